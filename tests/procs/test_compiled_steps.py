"""Steps of compiled replicas on process-ranks, against eager ones and against a bare model."""

from __future__ import annotations

import pytest

from tests.compile_bodies import everyday
from weft.testing.pool import shared_pool

GROUPS = pytest.mark.parametrize("group", ["gloo", "weft"])
WRAPS = pytest.mark.parametrize("wrap", ["replicate", "ddp"])


@GROUPS
@WRAPS
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_steps(wrap: str, backend: str, fullgraph: bool, group: str) -> None:
    shared_pool(2).run(everyday.steps, args=(wrap, backend, fullgraph), backend=group, timeout=120)
