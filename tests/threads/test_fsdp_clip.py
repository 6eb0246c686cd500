"""Norms of gradients over shards, and the scaler of mixed clip."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import clip
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", clip.BODIES)
def test_clip(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
