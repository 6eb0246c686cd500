"""Several compiled replicas in one process, on process-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import neighbours
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("body", neighbours.BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body: Callable[[str], None], backend: str) -> None:
    shared_pool(2).run(body, args=(backend,), backend="gloo", timeout=150)
