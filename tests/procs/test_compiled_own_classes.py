"""Compiled modules of the user's own classes, with large weights, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import own_classes
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("group", ["gloo", "weft"])
@pytest.mark.parametrize("wrap", ["replicate", "ddp"])
@pytest.mark.parametrize("body", own_classes.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str], None], wrap: str, group: str) -> None:
    shared_pool(2).run(body, args=(wrap,), backend=group, timeout=300)


@pytest.mark.parametrize("body", [own_classes.trained, own_classes.added_up])
def test_three_ranks(body: Callable[[str], None]) -> None:
    """The mean is of a number of ranks that is no power of two."""
    shared_pool(3).run(body, args=("replicate",), backend="weft", timeout=300)


@pytest.mark.parametrize("body", own_classes.ALONE, ids=lambda body: body.__name__)
def test_alone(body: Callable[[], None]) -> None:
    shared_pool(2).run(body, backend="weft", timeout=300)
