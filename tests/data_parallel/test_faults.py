"""A rank that fails or dies in a step: all others hear of it. A step that failed on all is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.deaths import Round, sightings, train_until_only_one_is_left
from tests.data_parallel.libraries import DistributedDataParallel, weft_only
from tests.data_parallel.twins import Twin, make_rows, mean_square, net, refusal_of, rows_of
from tests.local.deaths import nothing_left_behind, run_to_the_end
from tests.ranks import run_on
from weft.testing import Fault, inject


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


def run_until_it_fails(body, ranks: int = 3) -> weft.LaunchError:
    with pytest.raises(weft.LaunchError) as caught:
        weft.launch(body, ranks=ranks, kind="thread", timeout=60, collective_timeout=20)
    return caught.value


@weft_only("ends the process")
@pytest.mark.parametrize("cap", [0.0001, 25])
@pytest.mark.threads
def test_an_exception_in_one_ranks_backward_reaches_all(cap: float) -> None:
    def body() -> None:
        model = DistributedDataParallel(Torn(), bucket_cap_mb=cap)
        for step in range(4):
            model.module.is_torn = step == 2 and dist.get_rank() == 1
            mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()

    error = run_until_it_fails(body)
    assert isinstance(error.__cause__, BackwardError)
    assert "a hole in the cloth" in error.failures[1]
    for rank in (0, 2):
        assert "PeerError" in error.failures[rank], error.failures[rank]
        assert "rank 1" in error.failures[rank], error.failures[rank]
        assert "a hole in the cloth" in error.failures[rank], error.failures[rank]


@weft_only("ends the process")
@pytest.mark.threads
def test_an_exception_in_one_ranks_forward_reaches_all() -> None:
    def body() -> None:
        model = DistributedDataParallel(net())
        for step in range(3):
            rows = rows_of(make_rows(step), dist.get_rank())
            if step == 1 and dist.get_rank() == 0:
                rows = rows[:, :2]  # of another width than the layer's
            mean_square(model, rows, 0).backward()

    error = run_until_it_fails(body)
    for rank in (1, 2):
        assert "PeerError" in error.failures[rank]
        assert "rank 0" in error.failures[rank]


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.threads
def test_a_collective_that_raises_on_one_rank_reaches_all(call: int) -> None:
    def body() -> None:
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0001)
        fault = Fault(
            rank=2, action="raise", op="all_reduce", feature="ddp", call=call, error=OSError("no route")
        )
        with inject(fault):
            for step in range(4):
                mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()

    error = run_until_it_fails(body)
    assert "no route" in error.failures[2]
    for rank in (0, 1):
        assert "PeerError" in error.failures[rank]
        assert "rank 2" in error.failures[rank]


def fail_once(parallel: Any) -> None:
    """All ranks raise at one place, as for a batch that is no good, and drop the step."""
    parallel.module.is_torn = True
    with pytest.raises(BackwardError):
        mean_square(parallel, rows_of(make_rows(), dist.get_rank()), 0).backward()
    parallel.module.is_torn = False
    parallel.zero_grad()


@weft_only("says that the step before has not finished")
@pytest.mark.parametrize("view", [False, True])
@run_on(threads=2)
def test_a_backward_that_raised_before_a_bucket_was_full_is_forgotten(view: bool) -> None:
    twin = Twin(Torn(), gradient_as_bucket_view=view)
    for step in range(4):
        if step in (1, 2):
            fail_once(twin.parallel)
        twin.step(make_rows(step))


@weft_only("says that the step before has not finished")
@pytest.mark.parametrize("view", [False, True])
@run_on(threads=2)
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
@pytest.mark.threads
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


# -- ranks that die ----------------------------------------------------------------------------

TIMEOUT_SECS = 2.0
NOTICED_SECS = 8.0  # about one; the rest is for a machine that has other things to do

IN_THE_MIDDLE = Round(
    Fault(rank=3, action="kill", op="all_reduce", feature="ddp", call=3, step=1), 30.0, view=True
)
AT_THE_FIRST_BUCKET = Round(
    Fault(rank=2, action="exit", op="all_reduce", feature="ddp", call=0, step=0), 30.0, view=False
)
STANDING_STILL = Round(
    Fault(rank=1, action="stop", op="all_reduce", feature="ddp", call=2, step=2), TIMEOUT_SECS, view=True
)
# On gloo a rank hears only of its neighbours: there, one death a run, which ends the run.
CASES = [
    ("weft", [IN_THE_MIDDLE, AT_THE_FIRST_BUCKET, STANDING_STILL]),
    pytest.param("gloo", [AT_THE_FIRST_BUCKET], marks=pytest.mark.full),
]


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize(("backend", "rounds"), CASES, ids=["weft", "gloo"])
@pytest.mark.processes
def test_ranks_that_go_are_named_on_every_other(backend: str, rounds: list[Round], tmp_path: Path) -> None:
    victims = [round.fault.rank for round in rounds]
    with nothing_left_behind():
        error = run_to_the_end(
            train_until_only_one_is_left,
            (tmp_path, rounds),
            ranks=victims[0] + 1,
            backend=backend,
            collective_timeout=30,
        )
    seen = sightings(tmp_path)
    who = [(sighting.victim, sighting.rank) for sighting in seen]
    assert who == [(victim, rank) for victim in victims for rank in range(victim)], error
    for sighting in seen:
        assert sighting.ranks == [sighting.victim], sighting
        assert sighting.step == {3: 1, 2: 0, 1: 2}[sighting.victim], sighting
        assert sighting.secs < NOTICED_SECS, sighting
        is_late = sighting.victim == 1
        assert sighting.error == ("PeerTimeoutError" if is_late else "PeerError"), sighting
        assert str(sighting.victim) in sighting.message
