"""Errors, copies, saved states and Join of compiled models, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import lives
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("wrap", ["replicate", "ddp"])
@pytest.mark.parametrize("body", lives.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str], None], wrap: str) -> None:
    shared_pool(2).run(body, args=(wrap,), backend="gloo", timeout=120)


@pytest.mark.parametrize("group", ["gloo", "weft"])
def test_join(group: str) -> None:
    shared_pool(2).run(lives.joined, backend=group, timeout=120)
