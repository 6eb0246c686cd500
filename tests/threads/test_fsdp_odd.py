"""Odd shapes, dtypes, buffers and outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import odd
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", odd.BODIES)
def test_odd(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)
