"""More calls than threads, between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.rpc_bodies import load
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", load.BODIES)
def test_load(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", load.TWO_THREADS)
def test_two_threads(body: Body) -> None:
    on_threads(body, num_worker_threads=2)


@pytest.mark.parametrize("num_worker_threads", [1, 3])
def test_rings_deeper_than_the_pool(num_worker_threads: int) -> None:
    on_threads(load.rings_deeper_than_the_pool, num_worker_threads=num_worker_threads)


@pytest.mark.parametrize("body", load.FEW_IN_FLIGHT)
def test_few_in_flight(body: Body) -> None:
    on_threads(body, max_in_flight=load.MAX_IN_FLIGHT)
