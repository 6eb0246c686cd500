"""Tensor parallelism on ranks that are processes, over gloo and the local group; ranks that die.

Bodies of one kind run in one job, one after the other: starting a group costs more than most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel_bodies.deaths import sightings
from tests.local_bodies.deaths import nothing_left_behind, run_to_the_end
from tests.tp_bodies import graphs, misuse, modules, plans, prepare, state, styles, training, traps, uneven
from tests.tp_bodies.deaths import train_until_one_dies
from tests.tp_bodies.running import WEFT
from tests.tp_bodies.training import Setting
from weft.testing import Fault
from weft.testing.pool import shared_pool

NOTICED_SECS = 8.0  # about one; the rest is for a machine that has other things to do
BACKENDS = pytest.mark.parametrize("backend", ["weft", "gloo"])

PAIRS = [
    Setting("none", has_cut_sequence=True),
    Setting("replicate", has_cut_sequence=True, vocabulary=11),
    Setting("ddp", is_checkpointed=False),
    Setting("fully_shard", has_cut_sequence=True, max_norm=0.01),
]


def run(body: Callable[..., None], ranks: int, backend: str, *args: Any) -> None:
    shared_pool(ranks).run(body, args=args, backend=backend, timeout=120, collective_timeout=30)


def run_all(bodies: Sequence[Callable[..., None]]) -> None:
    for body in bodies:
        body(WEFT)


def train_pairs() -> None:
    for setting in PAIRS:
        training.train(WEFT, setting, training.STEPS, is_thorough=True)


@BACKENDS
def test_twenty_steps_of_adam(backend: str) -> None:
    run(train_pairs, 4, backend)


@BACKENDS
def test_two_axes(backend: str) -> None:
    run(run_all, 4, backend, [*training.ON_FOUR, *plans.ON_FOUR, *plans.WEFT_ONLY_ON_FOUR])


@pytest.mark.parametrize(
    "bodies",
    [
        [*styles.BODIES, *prepare.BODIES, *prepare.WEFT_ONLY],
        [*modules.BODIES, *modules.WEFT_ONLY, *plans.BODIES, *plans.WEFT_ONLY],
        [*traps.BODIES, *traps.WEFT_ONLY, *misuse.BODIES, traps.anomaly_mode],
        [*graphs.BODIES, *graphs.WEFT_ONLY, *state.BODIES, *state.WEFT_ONLY, state.pickled],
    ],
    ids=["styles", "modules", "traps", "graphs"],
)
def test_bodies(bodies: Sequence[Callable[..., None]]) -> None:
    run(run_all, 2, "gloo", bodies)  # threads have them on the local group


def test_uneven() -> None:
    run(run_all, 4, "gloo", uneven.BODIES)


@pytest.mark.parametrize(
    ("backend", "call"), [("weft", 1), ("weft", 3), ("gloo", 3)], ids=["forward", "backward", "gloo"]
)
def test_a_rank_that_dies_is_named_on_every_other(backend: str, call: int, tmp_path: Path) -> None:
    fault = Fault(rank=2, action="kill", op="all_reduce", feature="tp", call=call, step=1)
    with nothing_left_behind():
        error = run_to_the_end(
            train_until_one_dies, (WEFT, tmp_path, fault), ranks=3, backend=backend, collective_timeout=30
        )
    seen = sightings(tmp_path)
    assert [sighting.rank for sighting in seen] == [0, 1], error
    for sighting in seen:
        assert sighting.error == "PeerError", sighting
        assert sighting.ranks == [2], sighting
        assert sighting.step == 1, sighting
        assert sighting.secs < NOTICED_SECS, sighting
