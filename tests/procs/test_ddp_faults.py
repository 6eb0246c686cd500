"""Ranks die in a step: every other one gets an error that names them, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_parallel_bodies.deaths import Round, sightings, train_until_only_one_is_left
from tests.data_parallel_bodies.libraries import weft_only
from tests.local_bodies.deaths import nothing_left_behind, run_to_the_end
from weft.testing import Fault

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
CASES = [("weft", [IN_THE_MIDDLE, AT_THE_FIRST_BUCKET, STANDING_STILL]), ("gloo", [AT_THE_FIRST_BUCKET])]


@weft_only("makes calls that faults don't see")
@pytest.mark.parametrize(("backend", "rounds"), CASES, ids=["weft", "gloo"])
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
