"""Each style of tensor parallelism, with each layout of input and output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import styles
from tests.tp_bodies.running import LIBRARIES, on_threads


@LIBRARIES
@pytest.mark.parametrize("body", styles.BODIES)
def test_styles(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@LIBRARIES
@pytest.mark.parametrize("body", [styles.defaults, styles.sequence_parallel, styles.accumulated_gradients])
def test_styles_on_four_ranks(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 4, tp)


@LIBRARIES
@pytest.mark.parametrize("body", [styles.colwise_linear, styles.rowwise_embedding, styles.sequence_parallel])
def test_a_world_of_one(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 1, tp)
