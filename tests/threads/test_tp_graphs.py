"""Autograd around tensor parallelism, and copies of parallel models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import graphs
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", graphs.BODIES)
def test_graphs(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@pytest.mark.parametrize("body", graphs.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT)
