"""Ranks that compile differently, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import divergence
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("group", ["gloo", "weft"])
@pytest.mark.parametrize("body", divergence.BODIES, ids=lambda body: body.__name__)
def test_plain_backward(body: Callable[[str, str], None], group: str) -> None:
    shared_pool(2).run(divergence.each_wrap, args=(body, "plain"), backend=group, timeout=120)


@pytest.mark.parametrize("body", divergence.BODIES[:2], ids=lambda body: body.__name__)
def test_traced_backward(body: Callable[[str, str], None]) -> None:
    shared_pool(2).run(divergence.each_wrap, args=(body, "torch"), backend="gloo", timeout=120)


def test_four_ranks() -> None:
    shared_pool(4).run(
        divergence.recompile_on_one_rank, args=("replicate", "plain"), backend="weft", timeout=120
    )
