"""Data parallel under distributed autograd, on thread-ranks: gradients are those of loss.backward()."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import same_steps
from tests.ddp_rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", same_steps.BODIES, ids=lambda body: body.__name__)
def test_body(body: Body, backend: str) -> None:
    on_threads(body, backend)
