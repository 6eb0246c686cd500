"""Tensor parallelism on a GPU: collectives beside the computation, and streams other than the default.

On a rank that is a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import weft.tensor_parallel as tp
from tests.fully_shard.late_collectives import LateCollectives, LateWork, poisoned
from tests.ranks import run_on
from tests.tensor_parallel.models import Stacked, gathering_plan, mlp_plan
from tests.tensor_parallel.twins import (
    assert_close,
    assert_same_gradients,
    filled,
    local_input,
    numbers,
    part_of,
)
from weft.comm import collectives

pytestmark = [
    run_on(gpu=2, nccl=1, timeout=90, collective_timeout=20),
    run_on(nccl=2),
]

WIDTH, HIDDEN, ROWS = 256, 512, 64
BUSY_CYCLES = 10_000_000  # some five milliseconds
Plan = Callable[[Any, str], dict[str, Any]]
PLANS: list[tuple[Plan, Any]] = [(mlp_plan, Replicate()), (gathering_plan, Shard(0))]


class Late(LateCollectives):
    """Sums too are read and written by another stream, long after the host has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self._sum = dist.all_reduce

    def sum(self, tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return self._sum(tensor, *args, **kwargs)
        arrived = tensor.clone()
        self._sum(arrived, *args, **kwargs)
        return self._finish_late(tensor, arrived, tensor)

    def gather(
        self, out: torch.Tensor, tensor: torch.Tensor, group: Any, *, is_waited: bool = False
    ) -> LateWork | None:
        work = super().gather(out, tensor, group)
        return _waited_for(work) if is_waited else work

    def reduce(
        self, out: torch.Tensor, tensor: torch.Tensor, op: Any, group: Any, *, is_waited: bool = False
    ) -> LateWork | None:
        work = super().reduce(out, tensor, op, group)
        return _waited_for(work) if is_waited else work


def _waited_for(work: LateWork) -> None:
    """As torch leaves a call that isn't asynchronous: this stream waits, the host doesn't."""
    work.wait()


def mesh_on_gpu() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),))


@contextmanager
def late_collectives() -> Generator[None]:
    late = Late()
    with (
        mock.patch.object(dist, "all_reduce", late.sum),
        mock.patch.object(collectives, "all_gather_single", late.gather),
        mock.patch.object(collectives, "reduce_scatter_single", late.reduce),
    ):
        yield
    late.check()


class Spoiling(Stacked):
    """Between its layers memory that was given back is filled with NaN, in forward and in backward."""

    sizes = (ROWS * WIDTH, ROWS * HIDDEN, WIDTH * HIDDEN, ROWS * WIDTH // 2, ROWS * HIDDEN // 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = poisoned(rows + layer(rows), self.sizes, BUSY_CYCLES if number % 2 else 0)
        return rows


class Pair:
    """A model with a plan beside a bare one, on the GPU."""

    def __init__(self, plan: Plan, layout: Any) -> None:
        self.mesh, self.layout = mesh_on_gpu(), layout
        self.parallel, self.single = (
            filled(Spoiling(3, width=WIDTH, hidden=HIDDEN)).cuda() for _ in range(2)
        )
        tp.parallelize_module(self.parallel, self.mesh, plan(tp, "layers.*."))

    def inputs(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        full = numbers(ROWS, WIDTH, seed=step).cuda()
        return local_input(full, self.layout, self.mesh), full.requires_grad_()

    def run_single(self, full: torch.Tensor) -> None:
        self.single(full).square().sum().backward()

    def check(self, mine: torch.Tensor, full: torch.Tensor) -> None:
        """Gradients are copied in the order of the stream, before anyone waits for the GPU."""
        kept = {name: param.grad.to_local().clone() for name, param in self.parallel.named_parameters()}
        kept_input = mine.grad.clone()
        torch.cuda.synchronize()
        for name, param in self.parallel.named_parameters():
            assert torch.equal(kept[name], param.grad.to_local()), f"{name} came after backward had returned"
        assert_close(kept_input, part_of(full.grad, self.layout, self.mesh), "gradient of the input")
        assert_same_gradients(self.parallel, self.single)

    def update(self) -> None:
        for model in (self.parallel, self.single):
            torch.optim.SGD(model.parameters(), lr=1e-4).step()
            model.zero_grad()


def test_overlap() -> None:
    """The input's gradient is summed while the weight's is made; nobody waits for the GPU."""
    for plan, layout in PLANS:
        pair = Pair(plan, layout)
        for step in range(4):
            mine, full = pair.inputs(step)
            pair.run_single(full)
            torch.cuda._sleep(BUSY_CYCLES)
            pair.parallel(mine).square().sum().backward()
            pair.check(mine, full)
            pair.update()


@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_late() -> None:
    for plan, layout in PLANS:
        pair = Pair(plan, layout)
        for step in range(3):
            mine, full = pair.inputs(step)
            pair.run_single(full)
            with late_collectives():
                pair.parallel(mine).square().sum().backward()
                pair.check(mine, full)
            pair.update()


def test_on_a_side_stream() -> None:
    """Forward and backward there; forward there and backward here; and again."""
    side = torch.cuda.Stream()
    for plan, layout in PLANS:
        pair = Pair(plan, layout)
        for step, is_backward_there in enumerate([True, False, True, False]):
            mine, full = pair.inputs(step)
            pair.run_single(full)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = pair.parallel(mine).square().sum()
                if is_backward_there:
                    loss.backward()
            torch.cuda.current_stream().wait_stream(side)
            if not is_backward_there:
                loss.backward()
            pair.check(mine, full)
            pair.update()


def test_accumulated_for_another_stream() -> None:
    """A graph made here is kept, so autograd accumulates here, while this forward ran on a side stream.

    After backward the gradients are in order for the stream that called it, as a bare module's are.
    """
    side = torch.cuda.Stream()
    for plan, layout in PLANS:
        pair = Pair(plan, layout)
        held = pair.parallel(pair.inputs(99)[0])
        for step in range(3):
            mine, full = pair.inputs(step)
            pair.run_single(full)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = pair.parallel(mine).square().sum()
            torch.cuda.current_stream().wait_stream(side)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that the streams aren't the same
                loss.backward()
            pair.check(mine, full)
            pair.parallel.zero_grad()
            pair.single.zero_grad()
        del held


class Branches(nn.Module):
    """Two MLPs, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stacked(2, width=WIDTH, hidden=HIDDEN).layers
        self.side: torch.cuda.Stream | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.side is None:
            return self.layers[0](rows) + self.layers[1](rows)
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            there = self.layers[1](rows)
        ours = self.layers[0](rows)
        here.wait_stream(self.side)
        there.record_stream(here)
        return ours + there


def test_branches_on_two_streams() -> None:
    parallel, single = filled(Branches()).cuda(), filled(Branches()).cuda()
    tp.parallelize_module(parallel, mesh_on_gpu(), mlp_plan(tp, "layers.*."))
    parallel.side = torch.cuda.Stream()
    for step in range(4):
        full = numbers(ROWS, WIDTH, seed=step).cuda()
        mine, right = full.clone().requires_grad_(), full.clone().requires_grad_()
        parallel(mine).square().sum().backward()
        single(right).square().sum().backward()
        assert_close(mine.grad, right.grad, "gradient of the input")
        assert_same_gradients(parallel, single)
        parallel.zero_grad()
        single.zero_grad()
