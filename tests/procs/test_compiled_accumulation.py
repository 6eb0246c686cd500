"""Several forwards or backwards in a step of compiled models, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import accumulation, models
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("group", ["gloo", "weft"])
@pytest.mark.parametrize("body", accumulation.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str], None], group: str) -> None:
    shared_pool(2).run(models.each_wrap, args=(body,), backend=group, timeout=150)
