"""Methods other than forward, runs without gradients, unshard and reshard, settings, copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import methods
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", methods.BODIES)
def test_methods(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
