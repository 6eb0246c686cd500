"""Hooks of parameters and of reductions, and factors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import hooks
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", hooks.BODIES)
def test_hooks(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
