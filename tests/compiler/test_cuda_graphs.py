"""A step in a CUDA graph: the same losses as without one on nccl, a clear refusal elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft.tensor_parallel as tp
from tests.ranks import Place, run_on
from weft.comm_hooks import default_hooks, quantization_hooks
from weft.errors import StateError
from weft.testing.models import fill_parameters

# As torch does of captures that are refused.
pytestmark = pytest.mark.filterwarnings("default")

WIDTH = 64
NUM_EAGER = 3  # buckets and plans are made in the first steps
NUM_STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_spare = True

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return self.spare(rows) if self.uses_spare else rows


def make_net() -> Net:
    net = Net()
    fill_parameters(net, seed=3)
    return net.cuda()


def sharded(net: Net, **options: Any) -> nn.Module:
    for layer in net.layers:
        weft.fully_shard(layer, **options)
    return weft.fully_shard(net, **options)


def hooked(hook: Any) -> Callable[[Net], nn.Module]:
    def wrap(net: Net) -> nn.Module:
        module = weft.DistributedDataParallel(net)
        module.register_comm_hook(None, hook)
        return module

    return wrap


def split(net: Net) -> nn.Module:
    plan: dict[str, tp.ParallelStyle] = {
        "layers.0": tp.ColwiseParallel(),
        "layers.1": tp.RowwiseParallel(),
    }
    return tp.parallelize_module(net, init_device_mesh("cuda", (dist.get_world_size(),)), plan)


WRAPS: dict[str, Callable[[Net], nn.Module]] = {
    "ddp": weft.DistributedDataParallel,
    "ddp bf16": hooked(default_hooks.bf16_compress_hook),
    "ddp int8": hooked(quantization_hooks.quantization_pertensor_hook),
    "replicate": weft.replicate,
    "fully_shard": sharded,
    "fully_shard kept": lambda net: sharded(net, reshard_after_forward=False),
    "fully_shard bf16": lambda net: sharded(net, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16)),
    "tensor parallel": split,
}


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).cuda()


class Loop:
    """Steps on one batch that stays where it is."""

    def __init__(self, name: str) -> None:
        self.net = make_net()
        self.module = WRAPS[name](self.net)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, foreach=False)
        self.rank = 0 if name == "tensor parallel" else dist.get_rank()
        self.batch = batch_of(0, self.rank)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.module(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, first: int, last: int, step: Callable[[], torch.Tensor]) -> list[float]:
        losses: list[float] = []
        for number in range(first, last):
            self.batch.copy_(batch_of(number, self.rank))
            losses.append(step().item())
        return losses

    def warm_up(self) -> list[float]:
        """Steps on a side stream, as torch asks for them before a capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = self.train(0, NUM_EAGER, self.step)
        torch.cuda.current_stream().wait_stream(side)
        return losses


@run_on(nccl=(1, 2, 4), timeout=90, collective_timeout=30)
@pytest.mark.parametrize("name", list(WRAPS))
def test_a_captured_step_is_a_step(name: str) -> None:
    plain, captured = Loop(name), Loop(name)
    wanted = plain.train(0, NUM_STEPS, plain.step)
    found = captured.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured.step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    found += captured.train(NUM_EAGER, NUM_STEPS, replay)
    assert wanted[-1] < wanted[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    for mine, other in zip(captured.module.parameters(), plain.module.parameters(), strict=True):
        mine, other = (getattr(param, "_local_tensor", param) for param in (mine, other))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def assert_refused(name: str, words: str, prepare: Callable[[Loop], None]) -> None:
    """The capture raises, and the module trains on without a graph."""
    loop = Loop(name)
    if prepare is not first_step:
        loop.warm_up()
    prepare(loop)
    with pytest.raises(StateError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        loop.step()
    torch.cuda.synchronize()
    after = loop.train(0, 2, loop.step)
    assert all(loss == loss for loss in after)


def nothing(loop: Loop) -> None:
    pass


def first_step(loop: Loop) -> None:
    pass


def leave_out_a_layer(loop: Loop) -> None:
    loop.net.uses_spare = False


@run_on(gpu=2, gpu_gloo=2, timeout=60, collective_timeout=20)
@pytest.mark.parametrize("name", ["ddp", "replicate", "fully_shard", "tensor parallel"])
def test_engines_of_the_host_refuse(name: str, collected_for: Place) -> None:
    assert_refused(name, f"backend '{collected_for.backend}'", nothing)


@run_on(nccl=2, timeout=60, collective_timeout=20)
@pytest.mark.parametrize("name", ["ddp", "ddp bf16"])
@pytest.mark.parametrize("prepare", [first_step, leave_out_a_layer])
def test_what_needs_the_host_is_refused(name: str, prepare: Callable[[Loop], None]) -> None:
    words = "planned anew" if prepare is first_step else "no gradient on this rank"
    assert_refused(name, words, prepare)
