"""Data parallel over tensor-parallel modules on process-ranks, over gloo and the local group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data_parallel_bodies.on_mesh import BODIES
from weft.testing import shared_pool


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[str], None], backend: str) -> None:
    # One kind on each backend: what differs between them doesn't know of the group.
    kind = "ddp" if backend == "weft" else "replicate"
    shared_pool(4).run(body, args=(kind,), backend=backend, timeout=60)
