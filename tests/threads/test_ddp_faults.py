"""A rank that fails in a step: every other one hears of it. A step that failed on all is forgotten."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel_bodies.libraries import DistributedDataParallel, weft_only
from tests.data_parallel_bodies.twins import Twin, make_rows, mean_square, net, refusal_of, rows_of
from weft.testing import Fault, inject, on_ranks


class BackwardError(RuntimeError):
    """What a user's backward raises."""


class Failing(torch.autograd.Function):
    """Does nothing on the way there and raises on the way back."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise BackwardError("a hole in the cloth")


class Torn(nn.Module):
    """Its backward raises in the middle, if `is_torn`: the last layer has its gradient by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net(4)
        self.is_torn = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            rows = layer(rows)
            if place == 2 and self.is_torn:
                rows = Failing.apply(rows)
        return rows


def run(body, ranks: int = 3) -> weft.LaunchError:
    with pytest.raises(weft.LaunchError) as caught:
        weft.launch(body, ranks=ranks, kind="thread", timeout=60, collective_timeout=20)
    return caught.value


@weft_only("ends the process")
@pytest.mark.parametrize("cap", [0.0001, 25])
def test_an_exception_in_one_ranks_backward_reaches_all(cap: float) -> None:
    def body() -> None:
        model = DistributedDataParallel(Torn(), bucket_cap_mb=cap)
        for step in range(4):
            model.module.is_torn = step == 2 and dist.get_rank() == 1
            mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()

    error = run(body)
    assert isinstance(error.__cause__, BackwardError)
    assert "a hole in the cloth" in error.failures[1]
    for rank in (0, 2):
        assert "PeerError" in error.failures[rank], error.failures[rank]
        assert "rank 1" in error.failures[rank], error.failures[rank]
        assert "a hole in the cloth" in error.failures[rank], error.failures[rank]


@weft_only("ends the process")
def test_an_exception_in_one_ranks_forward_reaches_all() -> None:
    def body() -> None:
        model = DistributedDataParallel(net())
        for step in range(3):
            rows = rows_of(make_rows(step), dist.get_rank())
            if step == 1 and dist.get_rank() == 0:
                rows = rows[:, :2]  # of another width than the layer's
            mean_square(model, rows, 0).backward()

    error = run(body)
    for rank in (1, 2):
        assert "PeerError" in error.failures[rank]
        assert "rank 0" in error.failures[rank]


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize("call", [0, 1, 5])
def test_a_collective_that_raises_on_one_rank_reaches_all(call: int) -> None:
    def body() -> None:
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0001)
        fault = Fault(
            rank=2, action="raise", op="all_reduce", feature="ddp", call=call, error=OSError("no route")
        )
        with inject(fault):
            for step in range(4):
                mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()

    error = run(body)
    assert "no route" in error.failures[2]
    for rank in (0, 1):
        assert "PeerError" in error.failures[rank]
        assert "rank 2" in error.failures[rank]


def fail_once(parallel: nn.Module) -> None:
    """All ranks raise at one place, as for a batch that is no good, and drop the step."""
    parallel.module.is_torn = True
    with pytest.raises(BackwardError):
        mean_square(parallel, rows_of(make_rows(), dist.get_rank()), 0).backward()
    parallel.module.is_torn = False
    parallel.zero_grad()


@weft_only("says that the step before has not finished")
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_backward_that_raised_before_a_bucket_was_full_is_forgotten(view: bool) -> None:
    twin = Twin(Torn(), gradient_as_bucket_view=view)
    for step in range(4):
        if step in (1, 2):
            fail_once(twin.parallel)
        twin.step(make_rows(step))


@weft_only("says that the step before has not finished")
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_backward_that_raised_with_buckets_on_their_way_is_forgotten_or_remembered(view: bool) -> None:
    """Whether all ranks came equally far nobody knows: going on right, or an error that says why not."""
    twin = Twin(Torn(), bucket_cap_mb=0.0001, gradient_as_bucket_view=view)
    for step in range(2):
        twin.step(make_rows(step))
    fail_once(twin.parallel)
    refusal = refusal_of(lambda: twin.step(make_rows(2)))
    if refusal is not None:
        assert isinstance(refusal, weft.StateError | weft.PeerError)  # the other rank may have said it first
        assert "backward before this one failed" in str(refusal)


@weft_only("waits for ever, or mixes up buckets")
def test_a_rank_that_swallows_its_exception_is_not_silently_wrong() -> None:
    """Rank 1 drops its step and goes on; the others must not take its next step for this one unnoticed."""

    def body() -> None:
        twin = Twin(Torn(), bucket_cap_mb=0.0001)
        for step in range(3):
            twin.parallel.module.is_torn = step == 1 and dist.get_rank() == 1
            try:
                mean_square(twin.parallel, rows_of(make_rows(step), dist.get_rank()), 0).backward()
            except BackwardError:
                continue
        raise AssertionError("nobody noticed")

    with pytest.raises(weft.LaunchError) as caught:
        weft.launch(body, ranks=2, kind="thread", timeout=60, collective_timeout=2)
    assert "nobody noticed" not in caught.value.failures[0], caught.value
