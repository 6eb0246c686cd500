"""DDP and ZeRO under Join, on rank-processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.join_bodies.data_parallel import BODIES
from weft.testing import shared_pool


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[], None], backend: str) -> None:
    shared_pool(4).run(body, backend=backend, timeout=30)
