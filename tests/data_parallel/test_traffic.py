"""What DDP communicates: how many all-reduces, of how many bytes, and when."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.cases import FULL
from tests.data_parallel.hooks import future_of, mean_hook
from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel
from tests.data_parallel.twins import WIDTH, Twin, filled, make_rows, mean_square, net, rows_of
from tests.ranks import run_on
from weft.comm import Event
from weft.testing import Expect, assert_calls

pytestmark = run_on(threads=2)

RECORDED = pytest.mark.skipif(ON_TORCH, reason="torch's calls are not recorded")
MIB = 2**20
# Megabytes of a bucket, and how many of them four layers of one MiB need.
COUNTS = [(1, 4), (2, 2), (25, 1), pytest.param(0.001, 4, marks=FULL)]


def big_net(layers: int = 4) -> nn.Module:
    """Layers of one MiB each, without bias."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
    return filled(model, dtype=torch.float32)


def one_step(model: nn.Module, width: int) -> list[Event]:
    """The calls of a forward and backward, in order, after the buckets have been made."""
    rows = make_rows(width=width).to(next(model.parameters()).dtype)
    for _ in range(2):
        mean_square(model, rows_of(rows, dist.get_rank()), 0).backward()
    with weft.record() as events:
        mean_square(model, rows_of(rows, dist.get_rank()), 0).backward()
    return sorted(events, key=lambda event: event.start_secs)


def assert_bytes(sent: int, right: int, num_params: int, itemsize: int = 4) -> None:
    """A few numbers may ride along: for each parameter and each bucket, what this rank has used."""
    assert right <= sent <= right + 2 * (num_params + 1) * itemsize


def reductions(events: list[Event]) -> list[Event]:
    """Those of gradients; which parameters were used may take small ones besides."""
    return [event for event in events if event.op.startswith("all_reduce") and event.dtype.is_floating_point]


@RECORDED
@pytest.mark.parametrize(("cap", "count"), COUNTS)
@pytest.mark.parametrize("view", [False, pytest.param(True, marks=FULL)])
def test_an_all_reduce_for_each_bucket(cap: float, count: int, view: bool) -> None:
    model = DistributedDataParallel(big_net(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    reduced = reductions(one_step(model, 512))
    assert_calls(reduced, [Expect("all_reduce", feature="ddp", dtype=torch.float32)] * count)
    layers = 4 // count
    for event in reduced:
        assert_bytes(event.bytes_in, layers * MIB, num_params=layers)


def bucket_sizes(model: Any) -> list[int]:
    """The bytes of each bucket once buckets have been made anew."""
    sizes: list[int] = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return mean_hook(None, bucket)

    model.register_comm_hook(None, hook)
    rows = make_rows(width=512).float()
    for _ in range(3):
        sizes.clear()
        mean_square(model, rows_of(rows, dist.get_rank()), 0).backward()
    return sizes


@pytest.mark.parametrize(("cap", "count"), COUNTS)
def test_buckets_are_of_the_size_asked_for(cap: float, count: int) -> None:
    assert bucket_sizes(DistributedDataParallel(big_net(), bucket_cap_mb=cap)) == [4 * MIB // count] * count


def test_the_first_bucket_is_small_unless_a_size_is_given() -> None:
    """So that communication begins early: 1 MiB, then 25."""
    assert bucket_sizes(DistributedDataParallel(big_net())) == [MIB, 3 * MIB]


def test_a_size_for_each_bucket() -> None:
    model = DistributedDataParallel(big_net(), bucket_cap_mb_list=[1, 2, 25])
    assert bucket_sizes(model) == [MIB, 2 * MIB, MIB]


@RECORDED
def test_nothing_else_of_size_is_communicated() -> None:
    events = one_step(DistributedDataParallel(big_net(), bucket_cap_mb=1), 512)
    others = [event for event in events if event not in reductions(events)]
    assert sum(event.bytes_in for event in others) <= 64, others


@RECORDED
def test_every_gradient_travels_once_whatever_its_dtype() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
            self.params = nn.ParameterList(nn.Parameter(torch.ones(1000, dtype=dtype)) for dtype in dtypes)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return sum(param.double().sum() for param in self.params) * rows

    events = reductions(one_step(DistributedDataParallel(Mixed()), WIDTH))
    by_dtype = {
        dtype: sum(e.bytes_in for e in events if e.dtype == dtype) for dtype in {e.dtype for e in events}
    }
    assert_bytes(by_dtype.pop(torch.float32), 8000, num_params=2)
    assert_bytes(by_dtype.pop(torch.float64), 8000, num_params=1, itemsize=8)
    assert_bytes(by_dtype.pop(torch.bfloat16), 2000, num_params=1, itemsize=2)
    assert not by_dtype


@pytest.mark.parametrize("view", [False, True])
@run_on(threads=1)
def test_a_world_of_one_communicates_nothing(view: bool) -> None:
    model = nn.Sequential(net(), nn.BatchNorm1d(WIDTH).double())
    with weft.record() as events:
        twin = Twin(model, gradient_as_bucket_view=view)
        for step in range(3):
            twin.step(make_rows(step))
        with twin.parallel.no_sync():
            twin.backward(make_rows(5))
        twin.backward(make_rows(6))
        twin.check()
    assert events == []


@pytest.mark.parametrize("view", [False, True])
@run_on(threads=1)
def test_a_world_of_one_calls_hooks_all_the_same(view: bool) -> None:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=view)
    calls: list[int] = []

    def hook(state, bucket):
        calls.append(bucket.index())
        return future_of(bucket.buffer().fill_(2.0))

    model.register_comm_hook(None, hook)
    for _ in range(2):
        calls.clear()
        model.zero_grad()
        mean_square(model, make_rows(), 0).backward()
        assert calls == list(range(len(calls)))
        assert calls
        assert all((param.grad == 2).all() for param in model.parameters())


def test_a_hook_is_called_before_the_last_gradient_is_there() -> None:
    """The first layer's gradient comes last; by then all buckets but its own are on their way."""
    model: Any = DistributedDataParallel(net(4), bucket_cap_mb=0.0001)
    order: list[str] = []

    def hook(state, bucket):
        order.append(f"bucket {bucket.index()}")
        return mean_hook(None, bucket)

    model.register_comm_hook(None, hook)
    model.module[0].weight.register_hook(lambda grad: order.append("last gradient"))
    for step in range(3):
        order.clear()
        mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()
    num_before = order.index("last gradient")
    num_after = len(order) - 1 - num_before
    assert num_before >= 3, order
    assert 1 <= num_after <= 2, order


@RECORDED
def test_an_all_reduce_starts_before_the_last_gradient_is_there() -> None:
    model: Any = DistributedDataParallel(big_net(), bucket_cap_mb=1)
    moments: list[float] = []
    model.module[0].weight.register_hook(lambda grad: moments.append(time.perf_counter()))
    reduced = reductions(one_step(model, 512))
    assert [event.start_secs < moments[-1] for event in reduced] == [True, True, True, False]


@RECORDED
def test_bytes_of_tied_parameters_travel_once() -> None:
    first, second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    second.weight = first.weight
    model = DistributedDataParallel(filled(nn.Sequential(first, second), dtype=torch.float32))
    assert_bytes(sum(event.bytes_in for event in reductions(one_step(model, 512))), MIB, num_params=1)


@RECORDED
def test_frozen_parameters_do_not_travel() -> None:
    model: Any = big_net()
    model[1].requires_grad_(False)
    parallel = DistributedDataParallel(model)
    assert_bytes(sum(event.bytes_in for event in reductions(one_step(parallel, 512))), 3 * MIB, num_params=3)


@RECORDED
def test_buffers_travel_once_a_forward() -> None:
    model = nn.Sequential(net(1), nn.BatchNorm1d(WIDTH).double())
    parallel = DistributedDataParallel(model)
    events = one_step(parallel, WIDTH)
    sent = sum(event.bytes_in + event.bytes_out for event in events if event.op == "broadcast")
    assert sent == 2 * WIDTH * 8 + 8  # the running mean and variance, the count
