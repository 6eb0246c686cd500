"""Calls: where they run, what they carry, what comes back. Each test is right with torch's RPC too."""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on
from tests.rpc.remote_functions import Counter, add, count, echo, give, nothing, spot, trail, visits
from tests.rpc.workers import MODES, Worker, call, check_spot, takes

pytestmark = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


def test_calls_run_where_they_are_sent(worker: Worker) -> None:
    for mode in MODES:
        for rank in range(worker.size):
            if rank != worker.rank or mode != "remote":
                check_spot(worker, call(worker, mode, f"worker{rank}", spot, (worker.lib,)), rank)


def test_state_is_the_callees(worker: Worker) -> None:
    for mode in MODES:
        key = f"{mode} from {worker.name}"
        before = visits(worker.lib, key)
        assert [call(worker, mode, worker.next, count, (worker.lib, key)) for _ in range(3)] == [1, 2, 3]
        assert call(worker, mode, worker.next, visits, (worker.lib, key)) == 3
        assert visits(worker.lib, key) == before == 0


def test_a_worker_is_named_three_ways(worker: Worker) -> None:
    info = worker.rpc.get_worker_info(worker.next)
    assert (info.name, info.id) == (worker.next, worker.next_rank)
    for to in [worker.next, worker.next_rank, info]:
        for mode in MODES:
            assert call(worker, mode, to, spot, (worker.lib,)).worker == worker.next


def test_worker_infos_compare_and_travel(worker: Worker) -> None:
    mine = worker.rpc.get_worker_info()
    assert (mine.name, mine.id) == (worker.name, worker.rank)
    assert mine == worker.rpc.get_worker_info(worker.name) == worker.rpc.WorkerInfo(worker.name, worker.rank)
    assert mine != worker.rpc.get_worker_info(worker.next)
    assert str(mine) == f"WorkerInfo(id={worker.rank}, name={worker.name})"
    # Sent along, it is the same worker there.
    assert worker.rpc.rpc_sync(worker.next, give, (mine,)) == mine
    assert worker.rpc.rpc_sync(worker.next, own_info, (worker.lib,)) == worker.rpc.get_worker_info(
        worker.next
    )


def own_info(lib: str) -> Any:
    return import_module(lib).get_worker_info()


def test_arguments_arrive(worker: Worker) -> None:
    cases: list[tuple[Any, Any]] = [
        (None, None),
        ((), {}),
        ((1, "two", 3.0, None), None),
        (None, {"a": 1, "b": [2, {"c": (3,)}]}),
        ((b"bytes", {1, 2}, 1 + 2j), {"key": slice(1, 2)}),
        (("ü" * 1000,), {"x": "\0"}),
    ]
    for mode in MODES:
        for args, kwargs in cases:
            assert call(worker, mode, worker.next, echo, args, kwargs) == (tuple(args or ()), kwargs or {})
    assert worker.rpc.rpc_sync(worker.next, nothing) is None
    assert worker.rpc.rpc_async(worker.next, nothing).wait() is None
    assert worker.rpc.remote(worker.next, nothing).to_here() is None


def test_torch_functions_run_there(worker: Worker) -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    for mode in MODES:
        assert torch.equal(call(worker, mode, worker.next, torch.add, (x, y)), x + y)
        assert torch.equal(call(worker, mode, worker.next, torch.add, (x, 1)), x + 1)
        assert torch.equal(call(worker, mode, worker.next, torch.add, (x, y), {"alpha": 3}), x + 3 * y)
        assert torch.equal(call(worker, mode, worker.next, torch.mm, (x, y.t())), x @ y.t())
        assert torch.equal(call(worker, mode, worker.next, torch.Tensor.add, (x, y)), x + y)
        assert torch.equal(
            call(worker, mode, worker.next, torch.nn.functional.relu, (x - 3,)), (x - 3).relu()
        )


def test_builtins_run_there(worker: Worker) -> None:
    for mode in MODES:
        assert call(worker, mode, worker.next, min, ([4, 3, 5],)) == 3
        assert call(worker, mode, worker.next, len, ([4, 3, 5],)) == 3
        assert call(worker, mode, worker.next, "-".join, (["a", "b"],)) == "a-b"
        assert call(worker, mode, worker.next, str.upper, ("abc",)) == "ABC"
        # They run there too.
        assert call(worker, mode, worker.next, os.getpid) == worker.pids[worker.next_rank]
        assert (
            call(worker, mode, worker.next, threading.get_ident) != threading.get_ident()
            or len(set(worker.pids)) > 1
        )


def test_classes_and_methods_run_there(worker: Worker) -> None:
    for mode in MODES:
        made = call(worker, mode, worker.next, Counter, (5,))
        assert type(made) is Counter
        assert made.value == 5
        assert call(worker, mode, worker.next, Counter.make, (6,)).value == 6
        assert call(worker, mode, worker.next, Counter.scale, (3, 4)) == 12
        # A bound method takes its object along: a copy.
        mine = Counter(10)
        assert call(worker, mode, worker.next, mine.bump, (), {"by": 7}) == 17
        assert mine.value == 10
        assert call(worker, mode, worker.next, mine.address) != mine.address()


def test_futures_hold_what_comes_back(worker: Worker) -> None:
    future = worker.rpc.rpc_async(worker.next, add, (1, 2))
    assert isinstance(future, torch.futures.Future if worker.is_weft else torch._C.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3
    assert future.wait() == 3  # as often as one likes
    assert worker.rpc.rpc_async(worker.next, add, (1, 2)).then(lambda f: f.wait() * 10).wait() == 30
    seen: list[int] = []
    is_seen = threading.Event()
    worker.rpc.rpc_async(worker.next, add, (3, 4)).add_done_callback(
        lambda f: (seen.append(f.value()), is_seen.set())
    )
    assert is_seen.wait(20)
    assert seen == [7]
    many = [worker.rpc.rpc_async(worker.next, add, (i, i)) for i in range(20)]
    assert torch.futures.wait_all(many) == [2 * i for i in range(20)]
    assert torch.futures.collect_all(many).wait()[3].wait() == 6


def test_callbacks_may_call(worker: Worker) -> None:
    """A callback runs on a thread of the library, and calls on from there."""
    chained = worker.rpc.rpc_async(worker.next, add, (1, 2)).then(
        lambda f: worker.rpc.rpc_sync(worker.after_next, add, (f.wait(), 10))
    )
    assert chained.wait() == 13


@run_on(threads=1, timeout=90, collective_timeout=60, also=True)
def test_calls_to_oneself_copy(worker: Worker) -> None:
    for mode in MODES:
        seen = call(worker, mode, worker.name, spot, (worker.lib,))
        assert seen.worker == worker.name
        assert seen.pid == worker.pids[worker.rank]
        mine = [1, 2]
        assert call(worker, mode, worker.rank, append_three, (mine,)) == [1, 2, 3]
        assert mine == [1, 2]
    assert worker.rpc.rpc_sync(worker.name, spot, (worker.lib,)).thread != threading.get_ident()


def append_three(things: list[int]) -> list[int]:
    things.append(3)
    return things


@run_on(threads=1, timeout=90, collective_timeout=60, also=True)
def test_nested_calls_go_round(worker: Worker) -> None:
    # Round the ring, through oneself, twice.
    hops = [worker.next, worker.after_next, worker.name, worker.next, worker.after_next, worker.name]
    assert worker.rpc.rpc_sync(hops[0], trail, (worker.lib, hops[1:])) == hops[::-1]
    # To and fro: the caller answers calls while it waits.
    hops = [worker.next, worker.name] * 3
    assert worker.rpc.rpc_sync(hops[0], trail, (worker.lib, hops[1:])) == hops[::-1]


@run_on(weft=3, timeout=90, collective_timeout=60)  # a thread of a process with many workers is nobody's
def test_many_threads_call(worker: Worker) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for i in range(25):
                to = f"worker{(worker.rank + i) % worker.size}"
                got = worker.rpc.rpc_sync(to, add, (number * 1000, i))
                if got != number * 1000 + i:
                    wrong.append((number, i, got))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_wait_all_waits(worker: Worker) -> None:
    with worker.rpc.api._wait_all():
        futures = [worker.rpc.rpc_async(worker.next, add, (i, 1)) for i in range(10)]
    assert all(future.done() for future in futures)
    assert [future.value() for future in futures] == list(range(1, 11))


def test_gatherings_reach_all(worker: Worker) -> None:
    everyone = worker.rpc.api._all_gather((worker.rank, "hello"))
    assert everyone == {f"worker{rank}": (rank, "hello") for rank in range(worker.size)}
    some = {"worker0", "worker2"}
    if worker.name in some:
        assert worker.rpc.api._all_gather(worker.rank, some) == {"worker0": 0, "worker2": 2}
        worker.rpc.api._barrier(some)
    worker.rpc.api._barrier({f"worker{rank}" for rank in range(worker.size)})
    dist.barrier()


def test_a_barrier_waits_for_all(worker: Worker) -> None:
    key = "before the barrier"
    names = {f"worker{rank}" for rank in range(worker.size)}
    worker.rpc.rpc_sync("worker0", count, (worker.lib, key))
    worker.rpc.api._barrier(names)
    assert worker.rpc.rpc_sync("worker0", visits, (worker.lib, key)) == worker.size


def test_misuse_is_refused(worker: Worker) -> None:
    with pytest.raises(ValueError, match=r"Cannot get WorkerInfo from name 1\.5"):
        worker.rpc.rpc_sync(1.5, nothing)
    for to in ["nobody", 99]:
        for way in [worker.rpc.rpc_sync, worker.rpc.rpc_async, worker.rpc.remote]:
            with pytest.raises(RuntimeError, match=str(to)):
                way(to, nothing)
    with pytest.raises(RuntimeError, match="nobody"):
        worker.rpc.get_worker_info("nobody")
    for way in [worker.rpc.rpc_sync, worker.rpc.rpc_async]:
        with pytest.raises(TypeError, match="function should be callable"):
            way(worker.next, "no function")
    with pytest.raises(TypeError, match="missing 2 required positional arguments"), takes(at_most_secs=10):
        worker.rpc.rpc_sync(worker.next, add)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        worker.rpc.rpc_sync(worker.next, add, (1, 2), {"c": 3})
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3
