"""Ranks that die or stop: the others say who, soon; no process and no shared memory is left."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.local.chaos import KILLS_A_RUN, run_seed
from tests.local.deaths import go_one_by_one, nothing_left_behind, run_to_the_end, sightings

pytestmark = pytest.mark.processes

NOTICED_SECS = 2.0
TIMEOUT_SECS = 1.5
SLACK_SECS = 1.0  # for a machine that has other things to do


@pytest.mark.parametrize(
    ("whats", "in_it"),
    [
        (["all_reduce", "large all_reduce", "broadcast"], False),
        (["all_gather_object", "recv", "large recv"], False),
        (["allocated all_reduce", "all_to_all_single", "barrier"], True),
        (["all_gather_into_tensor", "recv from anyone", "async all_reduce"], True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_killed_rank_is_named_on_every_other(whats: list[str], in_it: bool, tmp_path: Path) -> None:
    with nothing_left_behind():
        error = run_to_the_end(
            partial(go_one_by_one, in_it=in_it),
            (tmp_path, "kill", whats, 20.0),
            ranks=4,
            backend="weft",
            collective_timeout=20,
        )
    assert "rank 3 of 4 died: killed by SIGKILL" in str(error), error
    seen = sightings(tmp_path)
    assert [(s.victim, s.rank) for s in seen] == [(3, 0), (3, 1), (3, 2), (2, 0), (2, 1), (1, 0)], error
    for sighting in seen:
        assert sighting.error == "PeerError", sighting
        assert sighting.ranks == [sighting.victim], sighting
        assert f"rank {sighting.victim}" in sighting.message, sighting
        noticed_secs = sighting.raised_secs - max(sighting.died_secs, sighting.entered_secs)
        assert noticed_secs < NOTICED_SECS, sighting


def test_a_stopped_rank_is_named_when_time_is_up(tmp_path: Path) -> None:
    with nothing_left_behind():
        error = run_to_the_end(
            partial(go_one_by_one, in_it=False),
            (tmp_path, "stop", ["all_reduce", "large recv", "broadcast"], TIMEOUT_SECS),
            ranks=4,
            backend="weft",
            collective_timeout=TIMEOUT_SECS,
            grace=1,
        )
    assert "ranks 1-3 had not ended 1 seconds after the failure and had to be killed" in str(error), error
    seen = sightings(tmp_path)
    assert [(s.victim, s.rank) for s in seen] == [(3, 0), (3, 1), (3, 2), (2, 0), (2, 1), (1, 0)], error
    for sighting in seen:
        assert sighting.error == "PeerTimeoutError", sighting
        assert sighting.ranks == [sighting.victim], sighting
        assert f"rank {sighting.victim}" in sighting.message, sighting
        took_secs = sighting.raised_secs - sighting.entered_secs
        assert TIMEOUT_SECS * 0.9 < took_secs < TIMEOUT_SECS + SLACK_SECS, sighting


# `scripts/kills --of local --kills 50` kills or stops fifty, and so does this with WEFT_TEST_KILLS=50.
NUM_RUNS = -(-int(os.environ.get("WEFT_TEST_KILLS", "6")) // KILLS_A_RUN)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_random_kills(seed: int) -> None:
    """At a random moment of random collectives."""
    run_seed(seed)
