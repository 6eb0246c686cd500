"""Compiled functions that hold more than a forward, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import whole_steps
from weft.testing.pool import shared_pool


@pytest.mark.parametrize(("wrap", "backend"), [("replicate", "aot_eager"), ("ddp", "eager")])
@pytest.mark.parametrize("body", whole_steps.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str, str], None], wrap: str, backend: str) -> None:
    shared_pool(2).run(body, args=(wrap, backend), backend="gloo", timeout=120)
