"""What fully_shard does when, and what it communicates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import recorded
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", recorded.BODIES)
def test_recorded(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)


def test_a_world_of_one() -> None:
    on_threads(recorded.a_world_of_one_communicates_nothing, 1)
