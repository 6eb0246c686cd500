"""Ranks that call things that don't fit together: an error on all of them, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.local_bodies.disagreement import MISMATCHES, expect_desync
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.full


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_every_rank_gets_the_error(mismatch: Callable[[], None], ranks: int) -> None:
    shared_pool(ranks).run(expect_desync, args=(mismatch,), backend="weft", timeout=30)
