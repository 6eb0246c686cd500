"""fully_shard in uses that once went wrong, on thread ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import traps
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", traps.BODIES)
def test_trap(body: Callable[[], None], ranks: int) -> None:
    on_threads(body, ranks)
