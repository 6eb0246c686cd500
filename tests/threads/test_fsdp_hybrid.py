"""Shards over one axis of a mesh, copies over another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import hybrid
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("body", hybrid.BODIES)
def test_hybrid(body: Callable[..., None]) -> None:
    on_threads(body, 4)
