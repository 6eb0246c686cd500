"""More calls than threads, between workers that are processes."""

from __future__ import annotations

import pytest

from tests.rpc_bodies import load
from tests.rpc_bodies.running import on_processes


def test_load() -> None:
    on_processes(load.BODIES)


def test_two_threads() -> None:
    on_processes(load.TWO_THREADS, num_worker_threads=2)


@pytest.mark.parametrize("num_worker_threads", [1, 3])
def test_rings_deeper_than_the_pool(num_worker_threads: int) -> None:
    on_processes(load.rings_deeper_than_the_pool, num_worker_threads=num_worker_threads)


def test_few_in_flight() -> None:
    on_processes(load.FEW_IN_FLIGHT, max_in_flight=load.MAX_IN_FLIGHT)
