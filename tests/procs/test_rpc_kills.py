"""Twenty workers killed in a storm of calls. scripts/kills does it for as long as one likes."""

from __future__ import annotations

import pytest

from tests.rpc_bodies.kills import kill_guests, kill_in_worlds


@pytest.mark.parametrize("seed", range(5))
def test_worlds_that_lose_all_but_one(seed: int) -> None:
    kill_in_worlds(seed)


def test_guests_of_a_late_group() -> None:
    kill_guests(10, seed=100)
