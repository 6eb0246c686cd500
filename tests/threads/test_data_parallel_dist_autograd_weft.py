"""Data parallel under distributed autograd, on thread-ranks: what weft has and torch has not."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import same_on_weft
from tests.ddp_rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", same_on_weft.BODIES, ids=lambda body: body.__name__)
def test_body(body: Body, backend: str) -> None:
    on_threads(body, backend)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", same_on_weft.BODIES_OF_FOUR, ids=lambda body: body.__name__)
def test_body_of_four(body: Body, backend: str) -> None:
    on_threads(body, backend, ranks=4, has_server=False)
