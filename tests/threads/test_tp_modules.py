"""Subclasses, users' modules and styles, tied weights, and modules that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import modules
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", modules.BODIES)
def test_modules(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", modules.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks, WEFT)
