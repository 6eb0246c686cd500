"""Parameters that a plan, or the user, puts elsewhere: other devices, other dtypes, other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import moves
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", moves.BODIES)
def test_moves(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", moves.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks, WEFT)
