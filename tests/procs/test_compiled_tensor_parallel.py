"""Compiled models under tensor parallel on process-ranks, against eager ones."""

from __future__ import annotations

import pytest

from tests.compile_bodies import split_unevenly
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pieces_of_different_sizes(backend: str) -> None:
    shared_pool(2).run(split_unevenly.steps, args=(backend,), backend="gloo", timeout=150)
