"""Tensor parallelism under each data parallelism, trained: equal to a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tp_bodies import training
from tests.tp_bodies.running import WEFT, on_threads
from tests.tp_bodies.training import Setting


@pytest.mark.parametrize("setting", training.VARIANTS, ids=str)
def test_training(setting: Setting) -> None:
    on_threads(training.train, 2 if setting.data == "none" else 4, WEFT, setting, 5)


@pytest.mark.parametrize("has_cut_sequence", [False, True])
def test_twenty_steps_of_adam(has_cut_sequence: bool) -> None:
    setting = Setting("none", has_cut_sequence=has_cut_sequence)
    on_threads(training.train, 2, WEFT, setting, training.STEPS, True)


def test_hybrid_sharding_on_eight_ranks() -> None:
    on_threads(training.train, 8, WEFT, Setting("hybrid", has_cut_sequence=True), 3)


@pytest.mark.parametrize("body", training.ON_FOUR)
def test_two_axes(body: Callable[..., None]) -> None:
    on_threads(body, 4, WEFT)


def test_the_seeds_case_with_checkpointing() -> None:
    on_threads(training.the_seeds_case, 4, WEFT, True)
