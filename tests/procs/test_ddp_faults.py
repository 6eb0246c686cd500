"""A rank dies in a step: every other one gets an error that names it, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_parallel_bodies.deaths import sightings, train_until_one_dies
from tests.data_parallel_bodies.libraries import weft_only
from tests.local_bodies.deaths import nothing_left_behind, run_to_the_end
from weft.testing import Fault

TIMEOUT_SECS = 15.0
NOTICED_SECS = 5.0  # on gloo about a second; the rest is for a machine that has other things to do

FAULTS = [
    Fault(rank=2, action="kill", op="all_reduce", feature="ddp", call=3, step=1),
    Fault(rank=0, action="exit", op="all_reduce", feature="ddp", call=0, step=0),
    Fault(rank=1, action="kill", step=3),
]


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize(("fault", "view"), [(FAULTS[0], True), (FAULTS[1], False), (FAULTS[2], False)])
def test_a_rank_that_dies_is_named_on_every_other(
    fault: Fault, view: bool, backend: str, tmp_path: Path
) -> None:
    with nothing_left_behind():
        error = run_to_the_end(
            train_until_one_dies,
            (tmp_path, fault, view),
            ranks=3,
            backend=backend,
            collective_timeout=TIMEOUT_SECS,
        )
    assert "nobody died" not in str(error)
    seen = sightings(tmp_path)
    assert sorted(seen) == [rank for rank in range(3) if rank != fault.rank], error
    for name, ranks, secs, _step, words in seen.values():
        assert name == "PeerError", words
        assert ranks == f"[{fault.rank}]", words
        assert f"rank {fault.rank}" in words
        assert float(secs) < NOTICED_SECS, words


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize("backend", ["weft"])
def test_a_rank_that_stops_is_named_when_time_is_up(backend: str, tmp_path: Path) -> None:
    fault = Fault(rank=1, action="stop", op="all_reduce", feature="ddp", call=2, step=1)
    with nothing_left_behind():
        error = run_to_the_end(
            train_until_one_dies,
            (tmp_path, fault, True),
            ranks=3,
            backend=backend,
            collective_timeout=2.0,
            grace=1,
        )
    seen = sightings(tmp_path)
    assert sorted(seen) == [0, 2], error
    for name, ranks, _secs, step, words in seen.values():
        assert name == "PeerTimeoutError", words
        assert ranks == "[1]", words
        assert step == "1"
