"""Where data parallel happens under distributed autograd, on thread-ranks: groups, servers, handlers."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import places_of_work
from tests.ddp_rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", places_of_work.BODIES, ids=lambda body: body.__name__)
def test_places(body: Body, backend: str) -> None:
    on_threads(body, backend)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", places_of_work.BODIES_OF_FOUR, ids=lambda body: body.__name__)
def test_groups(body: Body, backend: str) -> None:
    on_threads(body, backend, ranks=4, has_server=False)
