"""More than the pool has threads: deep rings, thousands of calls, handlers that wait."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on
from tests.rpc.remote_functions import Counter, add, count, gate_of, pass_gate, spot, trail, visits, visits_at
from tests.rpc.workers import Worker, takes, wait_until, with_options
from weft.rpc.bell import own_bell
from weft.rpc.pool import Pool

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]

NUM_CALLS = 3000
NUM_CALLS_OF_THREADS = 1000  # who all share one interpreter
MAX_IN_FLIGHT = 4


@with_options({"num_worker_threads": 1}, {"num_worker_threads": 2}, {"num_worker_threads": 3})
def test_rings_are_deeper_than_the_pool(worker: Worker) -> None:
    """Every worker's nested call goes round far more often than there are threads."""
    hops = [worker.next, worker.after_next, worker.name] * 7
    assert worker.rpc.rpc_sync(hops[0], trail, (worker.lib, hops[1:])) == hops[::-1]


@with_options({"num_worker_threads": 16}, {"num_worker_threads": 2})
def test_many_handlers_wait(worker: Worker) -> None:
    """Handlers that wait in each of the ways that don't use up the pool; far more of them than threads."""
    waits = [wait_in_sync, wait_for_future, wait_for_rref, wait_for_proxy]
    futures = [
        worker.rpc.rpc_async(worker.next, waits[i % 4], (worker.lib, worker.after_next, i)) for i in range(40)
    ]
    assert [future.wait() for future in futures] == [i + 1 for i in range(40)]


def wait_in_sync(lib: str, to: str, i: int) -> int:
    return import_module(lib).rpc_sync(to, add, (i, 1))


def wait_for_future(lib: str, to: str, i: int) -> int:
    return import_module(lib).rpc_async(to, add, (i, 1)).wait()


def wait_for_rref(lib: str, to: str, i: int) -> int:
    return import_module(lib).remote(to, add, (i, 1)).to_here()


def wait_for_proxy(lib: str, to: str, i: int) -> int:
    return import_module(lib).remote(to, Counter, (i,)).rpc_sync().bump()


def test_thousands_are_in_flight(worker: Worker) -> None:
    """All are sent before one is answered, since the first ones hold every thread of the callee."""
    before = f"worker{(worker.rank - 1) % worker.size}"
    key = f"flood {worker.name}"
    num_calls = NUM_CALLS if len(set(worker.pids)) > 1 else NUM_CALLS_OF_THREADS
    futures = [worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, key, i)) for i in range(num_calls)]
    wait_until(
        lambda: visits_at(worker.name, f"at gate flood {before}") > 0, "the first of the other's has begun"
    )
    dist.barrier()
    assert not any(future.done() for future in futures)
    dist.barrier()
    gate_of(worker.name, f"flood {before}").set()
    assert [future.wait() for future in futures] == list(range(num_calls))


def test_each_runs_once(worker: Worker) -> None:
    key = f"once {worker.name}"
    futures = [worker.rpc.rpc_async(worker.next, count, (worker.lib, key)) for _ in range(500)]
    assert sorted(future.wait() for future in futures) == list(range(1, 501))
    assert worker.rpc.rpc_sync(worker.next, visits, (worker.lib, key)) == 500


@with_options(num_worker_threads=2)
def test_as_many_run_at_a_time_as_told(worker: Worker) -> None:
    """Two calls run at a time, not one and not three: num_worker_threads=2."""
    before = f"worker{(worker.rank - 1) % worker.size}"
    key = f"two {worker.name}"
    futures = [worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, key)) for _ in range(5)]
    mine = f"at gate two {before}"
    wait_until(lambda: visits_at(worker.name, mine) >= 2, "two are at the gate")
    dist.barrier()
    assert visits_at(worker.name, mine) == 2
    dist.barrier()
    gate_of(worker.name, f"two {before}").set()
    for future in futures:
        future.wait()
    dist.barrier()
    assert visits_at(worker.name, mine) == 5


def test_threads_are_reused(worker: Worker) -> None:
    seen = {worker.rpc.rpc_sync(worker.next, spot, (worker.lib,)).thread for _ in range(100)}
    assert len(seen) <= 32


@with_options(max_in_flight=MAX_IN_FLIGHT)
def test_calls_wait_while_too_many_are_in_flight(worker: Worker) -> None:
    """With max_in_flight unanswered, the next call waits: for its turn, or until its time is up."""
    before = f"worker{(worker.rank - 1) % worker.size}"
    key = f"pushback {worker.name}"
    full = [worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, key, i)) for i in range(MAX_IN_FLIGHT)]
    for way in [worker.rpc.rpc_sync, worker.rpc.rpc_async]:
        with takes(0.2, 5), pytest.raises(weft.PeerTimeoutError, match="max_in_flight") as caught:
            torch.futures.wait_all([way(worker.next, add, (1, 2), timeout=0.2)])
        assert worker.next in str(caught.value)
        assert str(MAX_IN_FLIGHT) in str(caught.value)
    # Only to that one worker.
    assert worker.rpc.rpc_sync(worker.after_next, add, (1, 2)) == 3
    dist.barrier()
    gate_of(worker.name, f"pushback {before}").set()
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2), timeout=20) == 3
    assert [future.wait() for future in full] == list(range(MAX_IN_FLIGHT))
    many = [worker.rpc.rpc_async(worker.next, add, (i, i)) for i in range(200)]
    assert [future.wait() for future in many] == [2 * i for i in range(200)]


# -- the end of the pool: no thread of it runs on, however late it is ----------------------------------


class Ear:
    """Hears nothing."""

    def __init__(self) -> None:
        self.is_closing = False
        self.bell = own_bell(0)

    def has_mail(self) -> bool:
        return False

    def take(self) -> None:
        return None


@run_on()
def test_threads_that_are_on_their_way_out_are_waited_for() -> None:
    ear, held, threads = Ear(), threading.Event(), list[threading.Thread]()
    at_the_door = threading.Semaphore(0)

    @contextmanager
    def enter() -> Generator[None]:
        threads.append(threading.current_thread())
        yield
        at_the_door.release()
        held.wait(10)

    pool = Pool(ear, lambda _: None, enter, lambda: None, 4)
    pool.start()
    ear.is_closing = True
    ear.bell.wake()
    for _ in range(2):
        assert at_the_door.acquire(timeout=10)
    assert pool.num_threads == 0
    threading.Timer(0.05, held.set).start()
    pool.join(10)
    assert not any(thread.is_alive() for thread in threads)
