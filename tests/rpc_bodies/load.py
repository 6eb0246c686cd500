"""More than the pool has threads: deep rings, thousands of calls, handlers that wait."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import weft
from tests.rpc_bodies.calls import trail
from tests.rpc_bodies.places import (
    Counter,
    add,
    count,
    gate_of,
    pass_gate,
    spot,
    visits,
    visits_at,
)
from tests.rpc_bodies.running import Worker, takes, wait_until

NUM_CALLS = 3000
NUM_CALLS_OF_THREADS = 1000  # who all share one interpreter
MAX_IN_FLIGHT = 4


def rings_deeper_than_the_pool(w: Worker) -> None:
    """Every worker's nested call goes round far more often than there are threads; with two of them."""
    hops = [w.next, w.after_next, w.name] * 7
    assert w.rpc.rpc_sync(hops[0], trail, (w.lib, hops[1:])) == hops[::-1]


def many_waiting_handlers(w: Worker) -> None:
    """Handlers that wait in each of the ways that don't use up the pool; far more of them than threads."""
    waits = [wait_in_sync, wait_for_future, wait_for_rref, wait_for_proxy]
    futures = [w.rpc.rpc_async(w.next, waits[i % 4], (w.lib, w.after_next, i)) for i in range(40)]
    assert [future.wait() for future in futures] == [i + 1 for i in range(40)]


def wait_in_sync(lib: str, to: str, i: int) -> int:
    return import_module(lib).rpc_sync(to, add, (i, 1))


def wait_for_future(lib: str, to: str, i: int) -> int:
    return import_module(lib).rpc_async(to, add, (i, 1)).wait()


def wait_for_rref(lib: str, to: str, i: int) -> int:
    return import_module(lib).remote(to, add, (i, 1)).to_here()


def wait_for_proxy(lib: str, to: str, i: int) -> int:
    return import_module(lib).remote(to, Counter, (i,)).rpc_sync().bump()


def thousands_in_flight(w: Worker) -> None:
    """All are sent before one is answered, since the first ones hold every thread of the callee."""
    before = f"worker{(w.rank - 1) % w.size}"
    key = f"flood {w.name}"
    num_calls = NUM_CALLS if len(set(w.pids)) > 1 else NUM_CALLS_OF_THREADS
    futures = [w.rpc.rpc_async(w.next, pass_gate, (w.lib, key, i)) for i in range(num_calls)]
    wait_until(lambda: visits_at(w.name, f"at gate flood {before}") > 0, "the first of the other's has begun")
    dist.barrier()
    assert not any(future.done() for future in futures)
    dist.barrier()
    gate_of(w.name, f"flood {before}").set()
    assert [future.wait() for future in futures] == list(range(num_calls))


def each_runs_once(w: Worker) -> None:
    key = f"once {w.name}"
    futures = [w.rpc.rpc_async(w.next, count, (w.lib, key)) for _ in range(500)]
    assert sorted(future.wait() for future in futures) == list(range(1, 501))
    assert w.rpc.rpc_sync(w.next, visits, (w.lib, key)) == 500


def as_many_threads_as_told(w: Worker) -> None:
    """Two calls run at a time, not one and not three: num_worker_threads=2."""
    before = f"worker{(w.rank - 1) % w.size}"
    key = f"two {w.name}"
    futures = [w.rpc.rpc_async(w.next, pass_gate, (w.lib, key)) for _ in range(5)]
    mine = f"at gate two {before}"
    wait_until(lambda: visits_at(w.name, mine) >= 2, "two are at the gate")
    dist.barrier()
    assert visits_at(w.name, mine) == 2
    dist.barrier()
    gate_of(w.name, f"two {before}").set()
    for future in futures:
        future.wait()
    dist.barrier()
    assert visits_at(w.name, mine) == 5


def threads_are_reused(w: Worker) -> None:
    seen = {w.rpc.rpc_sync(w.next, spot, (w.lib,)).thread for _ in range(100)}
    assert len(seen) <= 32


def pushback(w: Worker) -> None:
    """With max_in_flight unanswered, the next call waits: for its turn, or until its time is up."""
    before = f"worker{(w.rank - 1) % w.size}"
    key = f"pushback {w.name}"
    full = [w.rpc.rpc_async(w.next, pass_gate, (w.lib, key, i)) for i in range(MAX_IN_FLIGHT)]
    for way in [w.rpc.rpc_sync, w.rpc.rpc_async]:
        with takes(0.2, 5), pytest.raises(weft.PeerTimeoutError, match="max_in_flight") as caught:
            torch.futures.wait_all([way(w.next, add, (1, 2), timeout=0.2)])
        assert w.next in str(caught.value)
        assert str(MAX_IN_FLIGHT) in str(caught.value)
    # Only to that one worker.
    assert w.rpc.rpc_sync(w.after_next, add, (1, 2)) == 3
    dist.barrier()
    gate_of(w.name, f"pushback {before}").set()
    assert w.rpc.rpc_sync(w.next, add, (1, 2), timeout=20) == 3
    assert [future.wait() for future in full] == list(range(MAX_IN_FLIGHT))
    many = [w.rpc.rpc_async(w.next, add, (i, i)) for i in range(200)]
    assert [future.wait() for future in many] == [2 * i for i in range(200)]


BODIES = [thousands_in_flight, each_runs_once, threads_are_reused, many_waiting_handlers]
TWO_THREADS = [rings_deeper_than_the_pool, many_waiting_handlers, as_many_threads_as_told]
FEW_IN_FLIGHT = [pushback]
