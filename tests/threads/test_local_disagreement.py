"""Ranks that call things that don't fit together: an error on all of them, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.local_bodies.disagreement import MISMATCHES, expect_desync


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_every_rank_gets_the_error(mismatch: Callable[[], None], ranks: int) -> None:
    weft.launch(expect_desync, args=(mismatch,), ranks=ranks, kind="thread", backend="weft", timeout=30)
