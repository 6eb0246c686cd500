"""Sparse gradients on thread-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.data_parallel_bodies import sparse
from tests.data_parallel_bodies.libraries import weft_only

WEFT_BODIES = [pytest.param(body, marks=weft_only("raises")) for body in sparse.WEFT_BODIES]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", [*sparse.BODIES, *WEFT_BODIES])
def test_sparse(body: Callable[[], None], backend: str) -> None:
    weft.launch(body, ranks=2, kind="thread", backend=backend, timeout=60)
