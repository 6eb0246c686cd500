"""Gradients clipped by ranks that are processes, over gloo and the local group."""

from __future__ import annotations

import pytest

from tests.optimizer_bodies import clip
from weft.testing.pool import shared_pool


def run_all() -> None:
    for body in clip.BODIES:
        body()


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_clip(backend: str) -> None:
    shared_pool(4).run(run_all, backend=backend, timeout=90, collective_timeout=20)
