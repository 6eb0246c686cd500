"""How often ranks talk in tensor parallelism, as weft.record has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tp_bodies import counts
from tests.tp_bodies.running import WEFT, on_threads


@pytest.mark.parametrize("body", counts.BODIES)
def test_counts(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT, "weft")


def test_a_world_of_one_says_nothing() -> None:
    on_threads(counts.a_world_of_one_says_nothing, 1, WEFT)
