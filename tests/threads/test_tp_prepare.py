"""What a module is given and gives, laid out as asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import prepare
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", prepare.BODIES)
def test_prepare(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@pytest.mark.parametrize("body", [prepare.inputs, prepare.outputs, prepare.both_in_one, *prepare.WEFT_ONLY])
def test_prepare_on_four_ranks(body: Callable[..., None]) -> None:
    on_threads(body, 4, WEFT)
