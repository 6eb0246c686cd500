"""Uneven inputs under distributed autograd, on thread-ranks."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import uneven
from tests.ddp_rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", uneven.BODIES, ids=lambda body: body.__name__)
def test_uneven(body: Body, backend: str) -> None:
    on_threads(body, backend, ranks=4)
