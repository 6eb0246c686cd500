"""Training on process-ranks, over gloo and the local group, against a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data_parallel_bodies import everyday, sparse
from tests.data_parallel_bodies.libraries import weft_only
from weft.testing.pool import shared_pool

SPARSE = [*sparse.BODIES, *(pytest.param(body, marks=weft_only("raises")) for body in sparse.WEFT_BODIES)]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", [*everyday.BODIES, *SPARSE])
def test_two_ranks(body: Callable[[], None], backend: str) -> None:
    shared_pool(2).run(body, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", everyday.BODIES)
def test_four_ranks(body: Callable[[], None], backend: str) -> None:
    shared_pool(4).run(body, backend=backend, timeout=60)
