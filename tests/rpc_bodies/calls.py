"""Calls: where they run, what they carry, what comes back. Each body holds for torch's RPC too."""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rpc.workers import MODES, Worker, call, takes
from tests.rpc_bodies.places import Counter, Spot, add, count, echo, give, nothing, spot, visits


def check_spot(w: Worker, seen: Spot, rank: int) -> None:
    """Fail unless it is that worker's process and a thread of its own."""
    assert seen.worker == f"worker{rank}"
    assert seen.pid == w.pids[rank]
    assert seen.thread != threading.get_ident() or seen.pid != w.pids[w.rank]


def calls_run_where_they_are_sent(w: Worker) -> None:
    for mode in MODES:
        for rank in range(w.size):
            if rank != w.rank or mode != "remote":
                check_spot(w, call(w, mode, f"worker{rank}", spot, (w.lib,)), rank)


def state_is_the_callees(w: Worker) -> None:
    for mode in MODES:
        key = f"{mode} from {w.name}"
        before = visits(w.lib, key)
        assert [call(w, mode, w.next, count, (w.lib, key)) for _ in range(3)] == [1, 2, 3]
        assert call(w, mode, w.next, visits, (w.lib, key)) == 3
        assert visits(w.lib, key) == before == 0


def a_worker_is_named_three_ways(w: Worker) -> None:
    info = w.rpc.get_worker_info(w.next)
    assert (info.name, info.id) == (w.next, w.next_rank)
    for to in [w.next, w.next_rank, info]:
        for mode in MODES:
            assert call(w, mode, to, spot, (w.lib,)).worker == w.next


def worker_infos(w: Worker) -> None:
    mine = w.rpc.get_worker_info()
    assert (mine.name, mine.id) == (w.name, w.rank)
    assert mine == w.rpc.get_worker_info(w.name) == w.rpc.WorkerInfo(w.name, w.rank)
    assert mine != w.rpc.get_worker_info(w.next)
    assert str(mine) == f"WorkerInfo(id={w.rank}, name={w.name})"
    # Sent along, it is the same worker there.
    assert w.rpc.rpc_sync(w.next, give, (mine,)) == mine
    assert w.rpc.rpc_sync(w.next, own_info, (w.lib,)) == w.rpc.get_worker_info(w.next)


def own_info(lib: str) -> Any:
    return import_module(lib).get_worker_info()


def arguments(w: Worker) -> None:
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
            assert call(w, mode, w.next, echo, args, kwargs) == (tuple(args or ()), kwargs or {})
    assert w.rpc.rpc_sync(w.next, nothing) is None
    assert w.rpc.rpc_async(w.next, nothing).wait() is None
    assert w.rpc.remote(w.next, nothing).to_here() is None


def torch_functions(w: Worker) -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    for mode in MODES:
        assert torch.equal(call(w, mode, w.next, torch.add, (x, y)), x + y)
        assert torch.equal(call(w, mode, w.next, torch.add, (x, 1)), x + 1)
        assert torch.equal(call(w, mode, w.next, torch.add, (x, y), {"alpha": 3}), x + 3 * y)
        assert torch.equal(call(w, mode, w.next, torch.mm, (x, y.t())), x @ y.t())
        assert torch.equal(call(w, mode, w.next, torch.Tensor.add, (x, y)), x + y)
        assert torch.equal(call(w, mode, w.next, torch.nn.functional.relu, (x - 3,)), (x - 3).relu())


def builtins(w: Worker) -> None:
    for mode in MODES:
        assert call(w, mode, w.next, min, ([4, 3, 5],)) == 3
        assert call(w, mode, w.next, len, ([4, 3, 5],)) == 3
        assert call(w, mode, w.next, "-".join, (["a", "b"],)) == "a-b"
        assert call(w, mode, w.next, str.upper, ("abc",)) == "ABC"
        # They run there too.
        assert call(w, mode, w.next, os.getpid) == w.pids[w.next_rank]
        assert call(w, mode, w.next, threading.get_ident) != threading.get_ident() or len(set(w.pids)) > 1


def classes_and_methods(w: Worker) -> None:
    for mode in MODES:
        made = call(w, mode, w.next, Counter, (5,))
        assert type(made) is Counter
        assert made.value == 5
        assert call(w, mode, w.next, Counter.make, (6,)).value == 6
        assert call(w, mode, w.next, Counter.scale, (3, 4)) == 12
        # A bound method takes its object along: a copy.
        mine = Counter(10)
        assert call(w, mode, w.next, mine.bump, (), {"by": 7}) == 17
        assert mine.value == 10
        assert call(w, mode, w.next, mine.address) != mine.address()


def futures(w: Worker) -> None:
    future = w.rpc.rpc_async(w.next, add, (1, 2))
    assert isinstance(future, torch.futures.Future if w.is_weft else torch._C.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3
    assert future.wait() == 3  # as often as one likes
    assert w.rpc.rpc_async(w.next, add, (1, 2)).then(lambda f: f.wait() * 10).wait() == 30
    seen: list[int] = []
    is_seen = threading.Event()
    w.rpc.rpc_async(w.next, add, (3, 4)).add_done_callback(lambda f: (seen.append(f.value()), is_seen.set()))
    assert is_seen.wait(20)
    assert seen == [7]
    many = [w.rpc.rpc_async(w.next, add, (i, i)) for i in range(20)]
    assert torch.futures.wait_all(many) == [2 * i for i in range(20)]
    assert torch.futures.collect_all(many).wait()[3].wait() == 6


def callbacks_may_call(w: Worker) -> None:
    """A callback runs on a thread of the library, and calls on from there."""
    chained = w.rpc.rpc_async(w.next, add, (1, 2)).then(
        lambda f: w.rpc.rpc_sync(w.after_next, add, (f.wait(), 10))
    )
    assert chained.wait() == 13


def calls_to_oneself(w: Worker) -> None:
    for mode in MODES:
        seen = call(w, mode, w.name, spot, (w.lib,))
        assert seen.worker == w.name
        assert seen.pid == w.pids[w.rank]
        mine = [1, 2]
        assert call(w, mode, w.rank, append_three, (mine,)) == [1, 2, 3]
        assert mine == [1, 2]
    assert w.rpc.rpc_sync(w.name, spot, (w.lib,)).thread != threading.get_ident()


def append_three(things: list[int]) -> list[int]:
    things.append(3)
    return things


def trail(lib: str, hops: list[str]) -> list[str]:
    """Go on to the next hop from here; the workers that it led through, last first."""
    rpc = import_module(lib)
    here = rpc.get_worker_info().name
    if not hops:
        return [here]
    return [*rpc.rpc_sync(hops[0], trail, (lib, hops[1:])), here]


def nested_calls(w: Worker) -> None:
    # Round the ring, through oneself, twice.
    hops = [w.next, w.after_next, w.name, w.next, w.after_next, w.name]
    assert w.rpc.rpc_sync(hops[0], trail, (w.lib, hops[1:])) == hops[::-1]
    # To and fro: the caller answers calls while it waits.
    hops = [w.next, w.name] * 3
    assert w.rpc.rpc_sync(hops[0], trail, (w.lib, hops[1:])) == hops[::-1]


def many_threads_call(w: Worker) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for i in range(25):
                to = f"worker{(w.rank + i) % w.size}"
                got = w.rpc.rpc_sync(to, add, (number * 1000, i))
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


def wait_all_waits(w: Worker) -> None:
    with w.rpc.api._wait_all():
        futures = [w.rpc.rpc_async(w.next, add, (i, 1)) for i in range(10)]
    assert all(future.done() for future in futures)
    assert [future.value() for future in futures] == list(range(1, 11))


def gatherings(w: Worker) -> None:
    everyone = w.rpc.api._all_gather((w.rank, "hello"))
    assert everyone == {f"worker{rank}": (rank, "hello") for rank in range(w.size)}
    some = {"worker0", "worker2"}
    if w.name in some:
        assert w.rpc.api._all_gather(w.rank, some) == {"worker0": 0, "worker2": 2}
        w.rpc.api._barrier(some)
    w.rpc.api._barrier({f"worker{rank}" for rank in range(w.size)})
    dist.barrier()


def a_barrier_waits_for_all(w: Worker) -> None:
    key = "before the barrier"
    names = {f"worker{rank}" for rank in range(w.size)}
    w.rpc.rpc_sync("worker0", count, (w.lib, key))
    w.rpc.api._barrier(names)
    assert w.rpc.rpc_sync("worker0", visits, (w.lib, key)) == w.size


def misuse(w: Worker) -> None:
    with pytest.raises(ValueError, match=r"Cannot get WorkerInfo from name 1\.5"):
        w.rpc.rpc_sync(1.5, nothing)
    for to in ["nobody", 99]:
        for way in [w.rpc.rpc_sync, w.rpc.rpc_async, w.rpc.remote]:
            with pytest.raises(RuntimeError, match=str(to)):
                way(to, nothing)
    with pytest.raises(RuntimeError, match="nobody"):
        w.rpc.get_worker_info("nobody")
    for way in [w.rpc.rpc_sync, w.rpc.rpc_async]:
        with pytest.raises(TypeError, match="function should be callable"):
            way(w.next, "no function")
    with pytest.raises(TypeError, match="missing 2 required positional arguments"), takes(at_most_secs=10):
        w.rpc.rpc_sync(w.next, add)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        w.rpc.rpc_sync(w.next, add, (1, 2), {"c": 3})
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


BODIES = [
    calls_run_where_they_are_sent,
    state_is_the_callees,
    a_worker_is_named_three_ways,
    worker_infos,
    arguments,
    torch_functions,
    builtins,
    classes_and_methods,
    futures,
    callbacks_may_call,
    calls_to_oneself,
    nested_calls,
    wait_all_waits,
    gatherings,
    a_barrier_waits_for_all,
    misuse,
]
ON_PROCESSES = [many_threads_call]  # a thread of a process with many workers is nobody's
