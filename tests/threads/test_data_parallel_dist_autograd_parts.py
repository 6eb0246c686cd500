"""Data parallel inside models with remote parts and around them, on thread-ranks."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import remote_graphs, remote_parts
from tests.ddp_rpc_bodies.running import Body, on_threads

BODIES = [*remote_parts.BODIES, *remote_graphs.BODIES]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Body, backend: str) -> None:
    on_threads(body, backend)
