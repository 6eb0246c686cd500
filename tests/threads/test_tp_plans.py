"""Plans of tensor parallelism: names, wildcards, source ranks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import plans
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", plans.BODIES)
def test_plans(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@LIBRARIES
@pytest.mark.parametrize("body", plans.ON_FOUR)
def test_plans_on_four_ranks(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 4, tp)


@pytest.mark.parametrize("body", plans.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT)


@pytest.mark.parametrize("body", plans.WEFT_ONLY_ON_FOUR)
def test_ours_alone_on_four_ranks(body: Callable[..., None]) -> None:
    on_threads(body, 4, WEFT)
