"""RRefs between workers that are threads of one process: use, and how long values live."""

from __future__ import annotations

import pytest

from tests.rpc_bodies import lifetimes, rrefs
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", [*rrefs.BODIES, *rrefs.WEFT_ONLY])
def test_rrefs(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", [*lifetimes.BODIES, *lifetimes.WEFT_ONLY])
def test_lifetimes(body: Body) -> None:
    on_threads(body)
