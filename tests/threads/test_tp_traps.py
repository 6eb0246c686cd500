"""What could go wrong around a parallel module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import traps
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", traps.BODIES)
def test_traps(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@LIBRARIES
@pytest.mark.parametrize("body", traps.ON_FOUR)
def test_traps_on_four_ranks(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 4, tp)


@pytest.mark.parametrize("body", traps.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT)


@pytest.mark.parametrize("body", traps.WEFT_ONLY_ON_FOUR)
def test_ours_alone_on_four_ranks(body: Callable[..., None]) -> None:
    on_threads(body, 4, WEFT)
