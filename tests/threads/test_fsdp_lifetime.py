"""A sharded model over its life: made, loaded, cast, run in parts, failed, freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import lifetime
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", lifetime.BODIES)
def test_lifetime(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
