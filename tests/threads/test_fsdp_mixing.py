"""Several sharded models in one step, library modules, autocast, offload."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import mixing
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", mixing.BODIES)
def test_mixing(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
