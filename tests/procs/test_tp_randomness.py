"""Random numbers under tensor parallelism: ranks are processes, since threads share a generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tp_bodies import randomness
from tests.tp_bodies.running import WEFT
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("body", randomness.BODIES)
def test_randomness(body: Callable[..., None]) -> None:
    shared_pool(2).run(body, args=(WEFT,), backend="weft", timeout=60, collective_timeout=20)


@pytest.mark.parametrize(
    "body",
    [
        randomness.masks_are_each_ranks_own,
        randomness.initialised_as_by_one,
        randomness.initialised_under_sharding,
    ],
)
def test_randomness_on_four_ranks(body: Callable[..., None]) -> None:
    shared_pool(4).run(body, args=(WEFT,), backend="weft", timeout=60, collective_timeout=20)
