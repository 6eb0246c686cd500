"""Join's promises, on rank-processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.join_bodies.seed import BODIES
from weft.testing import shared_pool


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[], None], ranks: int, backend: str) -> None:
    shared_pool(ranks).run(body, backend=backend, timeout=60)
