"""Join where something is odd, on rank-processes over gloo and the local group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.join_bodies import edges
from weft.testing import shared_pool


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("body", [*edges.BODIES, *edges.FOR_FOUR], ids=lambda body: body.__name__)
def test_body(body: Callable[[], None], backend: str) -> None:
    shared_pool(4).run(body, backend=backend, timeout=60)


@pytest.mark.parametrize("body", edges.FOR_PROCESSES, ids=lambda body: body.__name__)
def test_process_body(body: Callable[[], None]) -> None:
    shared_pool(4).run(body, backend="weft", timeout=60)
