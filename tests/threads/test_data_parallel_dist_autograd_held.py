"""Gradients that are held under distributed autograd, on thread-ranks."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import held
from tests.ddp_rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", held.BODIES, ids=lambda body: body.__name__)
def test_held(body: Body, backend: str) -> None:
    on_threads(body, backend)
