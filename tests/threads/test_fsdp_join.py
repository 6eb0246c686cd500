"""Uneven inputs: Join with a fully sharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import join
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", join.BODIES)
def test_join(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
