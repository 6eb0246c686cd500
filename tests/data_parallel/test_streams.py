"""Data parallel on CUDA: the order of streams, and what a step takes of the GPU's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from tests.data_parallel.twins import filled, rows_of, single_loss
from tests.data_parallel.twins_on_gpu import BUSY_CYCLES, make_twin, reduce_hook, rows_on_gpu
from tests.ranks import run_on

pytestmark = [
    run_on(gpu=2, nccl=1, timeout=60, collective_timeout=20),
    run_on(nccl=(2, 4)),
    pytest.mark.filterwarnings("default"),  # torch has some for GPUs, other ones with each release
]


class Busy(torch.autograd.Function):
    """Keeps the GPU busy before the gradient is made."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda._sleep(BUSY_CYCLES)
        return grad.clone()


class Deep(nn.Module):
    """Large layers, with a GPU that is busy now and then in the parallel one's backward."""

    def __init__(self, depth: int = 12, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.tanh(layer(rows))
            if number % 3 == 0:
                rows = Busy.apply(rows)
        return rows


def test_overlap() -> None:
    for view in (False, True):
        twin = make_twin(Deep(), bucket_cap_mb=3, gradient_as_bucket_view=view)
        for step in range(4):
            torch.cuda._sleep(BUSY_CYCLES)
            twin.backward(rows_on_gpu(step, width=512))
            # Used at once, in the order of the stream; nobody waits for the GPU.
            twin.check(1e-12)
            twin.update()


def test_a_side_stream() -> None:
    """Forward and backward on another stream; then forward there and backward here."""
    twin = make_twin(Deep(6), bucket_cap_mb=3)
    side = torch.cuda.Stream()
    for step, is_backward_there in enumerate([True, False, True]):
        rows = rows_on_gpu(step, width=512)
        single_loss(twin.single, rows).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = twin.parallel(rows_of(rows, dist.get_rank())).square().mean()
            if is_backward_there:
                loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        if not is_backward_there:
            loss.backward()
        twin.check(1e-12)
        twin.update()


class Forked(nn.Module):
    """Two branches, each on a stream of its own: gradients of one bucket come on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(512, 512), nn.Linear(512, 512)
        self.streams: list[Any] = []
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        outs: list[torch.Tensor] = []
        for branch, stream in zip((self.left, self.right), self.streams or (here, here), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                outs.append(branch(Busy.apply(rows)) if branch is self.left else branch(rows))
                outs[-1] = Busy.apply(outs[-1]) if branch is self.right else outs[-1]
        for stream in self.streams:
            here.wait_stream(stream)
        return outs[0] + outs[1]


def test_two_streams_in_a_bucket() -> None:
    twin = make_twin(Forked(), bucket_cap_mb=25)
    twin.parallel.module.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(5):
        rows = rows_on_gpu(step, width=512)
        single_loss(twin.single, rows).backward()
        twin.parallel(rows_of(rows, dist.get_rank())).square().mean().backward()
        twin.check(1e-12)
        twin.update()


def make_plain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(40)))


def make_ours() -> weft.DistributedDataParallel:
    ours = weft.DistributedDataParallel(make_plain())
    if dist.get_world_size() == 1:
        ours.register_comm_hook(None, reduce_hook)
    return ours


def peak_bytes(make: Callable[[], nn.Module]) -> int:
    """The most that a step takes of torch's allocator, the model included."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    module = make()
    rows = torch.randn(64, 1024, device="cuda")
    for _ in range(3):
        module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        module(rows).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@run_on(gpu=2, nccl=1, timeout=60, collective_timeout=20)
def test_memory() -> None:
    """As much as torch's DDP without copies of gradients, and a bucket: gradients wait for it to be full."""
    is_alone = dist.get_world_size() == 1
    group = None if is_alone else dist.new_group(backend="gloo")
    limit = peak_bytes(lambda: TorchDDP(make_plain(), process_group=group, gradient_as_bucket_view=True))
    seen = peak_bytes(make_ours)
    if not is_alone:  # the local group's buffers are not of torch's allocator
        seen += sum(param.nbytes for param in make_plain().parameters())
    bucket_bytes = 25 * 2**20
    assert seen <= limit + bucket_bytes, f"weft {seen / 2**20:.1f} MB, torch {limit / 2**20:.1f} MB"
