"""Contexts, and where the graph is cut, between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.dist_autograd_bodies import contexts, corners, cuts, received
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", contexts.BODIES)
def test_contexts(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", cuts.BODIES)
def test_cuts(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", received.BODIES)
def test_received(body: Body) -> None:
    on_threads(body)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("body", [*corners.BODIES, *corners.WEFT_ONLY, *corners.ON_THREADS])
def test_corners(body: Body) -> None:
    on_threads(body)
