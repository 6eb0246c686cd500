"""Buffers of a DDP module: broadcast in each forward, or kept alike by a hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation as TorchLocation

import weft
from tests.data_parallel import libraries
from tests.data_parallel.twins import WIDTH, filled, make_rows, mean_square, rows_of
from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.data_parallel import BufferCommHookLocation
from weft.join import Join

pytestmark = run_on(threads=2)

DEPRECATED = pytest.mark.filterwarnings("ignore:.*`broadcast_buffers`:FutureWarning")

PRE, POST = BufferCommHookLocation.PRE_FORWARD, BufferCommHookLocation.POST_FORWARD


class Counting(nn.Module):
    """Adds 1 to a buffer in forward, and shows what the buffer was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inner: Any = nn.Module()
        self.inner.register_buffer("count", torch.zeros(3))
        self.register_buffer("ignored", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = self.inner.count.clone()
        self.inner.count += 1 + dist.get_rank()
        return self.layer(rows)


def make(**options: Any) -> DistributedDataParallel:
    model = Counting()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
    return DistributedDataParallel(model, **options)


def add_up(names: list[list[str]], buffers: dict[str, torch.Tensor]) -> None:
    names.append(list(buffers))
    for buffer in buffers.values():
        dist.all_reduce(buffer)


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    "location", [PRE, POST, TorchLocation.PRE_FORWARD, TorchLocation.POST_FORWARD], ids=str
)
def test_runs_before_or_after_forward(location: Any) -> None:
    ddp: Any = make()
    names: list[list[str]] = []
    ddp._register_buffer_comm_hook(names, add_up, location)
    before = [0.0, 0.0]  # what the two ranks have
    for _ in range(3):
        step(ddp)
        if location.name == "PRE_FORWARD":
            assert ddp.module.seen.tolist() == [sum(before)] * 3
            before = [sum(before) + 1, sum(before) + 2]
        else:
            assert ddp.module.seen.tolist() == [before[0]] * 3
            before = [sum(before) + 3] * 2
        assert ddp.module.inner.count.tolist() == [before[dist.get_rank()]] * 3
    assert names == [["inner.count"]] * 3


def test_futures_are_waited_for_at_the_end_of_backward() -> None:
    ddp, futures = make(), list[Future[Any]]()

    def later(state: None, buffers: dict[str, torch.Tensor]) -> list[Future[Any]]:
        futures.append(Future())
        return futures[-1:]

    ddp._register_buffer_comm_hook(None, later)
    loss = ddp(torch.ones(1, 2)).sum()
    futures[0].set_exception(ArithmeticError("of the hook's work"))
    with pytest.raises(ArithmeticError, match="of the hook's work"):
        loss.backward()
    loss = ddp(torch.ones(1, 2)).sum()
    futures[1].set_result(None)
    loss.backward()


def test_futures_of_collectives() -> None:
    ddp: Any = make()

    def add_up_later(_: None, buffers: dict[str, torch.Tensor]) -> list[Any]:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        return [work.get_future() for work in works]

    ddp._register_buffer_comm_hook(None, add_up_later)
    step(ddp)
    assert ddp.module.inner.count.tolist() == [3.0] * 3


def test_without_sync_no_hook_runs_and_copies_have_it() -> None:
    ddp: Any = make()
    names: list[list[str]] = []
    ddp._register_buffer_comm_hook(names, add_up, PRE)
    step(ddp)
    with ddp.no_sync():
        step(ddp)  # the step before was synced
        step(ddp)
    assert len(names) == 2
    step(copy.deepcopy(ddp))
    assert len(names) == 3
    plain = make(forward_sync_buffers=False)
    plain._register_buffer_comm_hook(names, add_up, PRE)
    step(plain)
    assert len(names) == 3


def test_the_default_as_a_hook() -> None:
    ddp: Any = make()
    ddp._register_buffer_comm_hook(
        None, lambda _, buffers: ddp._default_broadcast_coalesced(list(buffers.values()))
    )
    for num in range(2):
        step(ddp)
        assert ddp.module.inner.count.tolist() == [num + 1.0] * 3  # the first rank's


def test_errors() -> None:
    ddp = make()
    with pytest.raises(AssertionError, match="hook must be callable, got str"):
        ddp._register_buffer_comm_hook(None, "hook")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PRE_FORWARD"):
        ddp._register_buffer_comm_hook(None, add_up, "before")
    with pytest.raises(ValueError, match="bytes above 0"):
        ddp.broadcast_bucket_size = 0
    ddp._register_buffer_comm_hook(None, lambda _, buffers: buffers, PRE)
    with pytest.raises(TypeError, match=r"list of torch\.futures\.Future, got dict"):
        ddp(torch.ones(1, 2))
    ddp._register_buffer_comm_hook([], add_up)
    with pytest.raises(RuntimeError, match="Join can't stand in"), Join([ddp]):
        ddp(torch.ones(1, 2))


def test_broadcast_bucket_size() -> None:
    """How much goes in one message; 250 MB unless it is set, also in copies."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    for number in range(4):
        model.register_buffer(f"buffer{number}", torch.zeros(8))
    ddp = DistributedDataParallel(model)
    assert ddp.broadcast_bucket_size == 250 * 1024 * 1024
    counts: list[int] = []
    for num_bytes in (1000, 64, 32):
        ddp.broadcast_bucket_size = num_bytes
        again = copy.deepcopy(ddp)
        assert again.broadcast_bucket_size == num_bytes
        for each in (ddp, again):
            with weft.record() as events:
                each(torch.ones(2, 2))
            counts.append([event.op for event in events].count("broadcast"))
    assert counts == [1, 1, 2, 2, 4, 4]


# -- broadcast in each forward --------------------------------------------------------------


class Counted(nn.Module):
    """Buffers that each rank changes in its own way before a forward."""

    mean: torch.Tensor
    count: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = filled(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = [self.mean[0].item(), self.count.item(), self.scratch[0].item()]
        return self.layer(rows)

    def change(self, value: int) -> None:
        for buffer in self.buffers():
            buffer.fill_(value)


@run_on(threads=3)
def test_buffers_are_broadcast_in_each_forward() -> None:
    parallel: Any = libraries.DistributedDataParallel(Counted())
    for step in range(3):
        parallel.module.change(10 * step + dist.get_rank() + 1)
        mean_square(parallel, rows_of(make_rows(), dist.get_rank()), 0).backward()
        assert parallel.module.seen == [10 * step + 1.0] * 3


def test_buffers_are_left_alone_where_they_are_not_synced() -> None:
    parallel: Any = libraries.DistributedDataParallel(Counted(), forward_sync_buffers=False)
    for step in range(2):
        mine = 10 * step + dist.get_rank() + 1
        parallel.module.change(mine)
        parallel(make_rows())
        assert parallel.module.seen == [mine] * 3


def test_forward_sync_buffers_leaves_the_construction_alone() -> None:
    model = Counted()
    model.change(dist.get_rank() + 1)
    libraries.DistributedDataParallel(model, forward_sync_buffers=False)
    assert model.mean[0] == 1


@DEPRECATED
def test_broadcast_buffers_is_about_the_construction_too() -> None:
    model = Counted()
    model.change(dist.get_rank() + 1)
    parallel = libraries.DistributedDataParallel(model, broadcast_buffers=False)
    assert model.mean[0] == dist.get_rank() + 1
    parallel(make_rows())
    assert model.seen == [dist.get_rank() + 1] * 3
    synced = libraries.DistributedDataParallel(model, broadcast_buffers=True)
    model.change(dist.get_rank() + 1)
    synced(make_rows())
    assert model.seen == [1] * 3


def test_under_no_sync_buffers_are_not_broadcast() -> None:
    parallel: Any = libraries.DistributedDataParallel(Counted())
    parallel.module.change(dist.get_rank() + 1)
    with parallel.no_sync():
        parallel(make_rows()).sum().backward()
        parallel.module.change(dist.get_rank() + 1)
        parallel(make_rows()).sum().backward()
    # The forward that follows a synced backward would broadcast; within accumulation there is none.
    assert parallel.module.seen == [dist.get_rank() + 1] * 3
