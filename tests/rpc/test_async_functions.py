"""functions.async_execution: the handler's answer is a future, and its thread is free meanwhile."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.ranks import run_on
from tests.rpc.remote_functions import add, count, deferred, fail_with, me, visits
from tests.rpc.workers import MODES, WEFT, Worker, call, weft_only, with_options

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


@deferred
def add_there(lib: str, to: str, x: Any, y: Any) -> Any:
    count(lib, "add_there")
    return import_module(lib).rpc_async(to, add, (x, y))


@deferred
def add_chained(lib: str, hops: list[str], x: int) -> Any:
    """One more at each hop, each of which waits for the next without a thread."""
    rpc = import_module(lib)
    if not hops:
        done = rpc_future()
        done.set_result(x)
        return done
    return rpc.rpc_async(hops[0], add_chained, (lib, hops[1:], x + 1))


def rpc_future() -> Any:
    return torch.futures.Future()


@deferred
def add_then(lib: str, to: str, x: int, y: int, z: int) -> Any:
    return import_module(lib).rpc_async(to, add, (x, y)).then(lambda f: f.wait() + z)


@deferred
def fail_at_once(text: str) -> Any:
    raise ValueError(text)


@deferred
def fail_later(lib: str, to: str, text: str) -> Any:
    return import_module(lib).rpc_async(to, fail_with, (ValueError, text))


@deferred
def no_future() -> Any:
    return 3


@deferred
def set_by_a_thread(lib: str) -> Any:
    """Set by no thread of the library, after the handler has returned."""
    done, name = rpc_future(), me(lib)
    threading.Timer(0.05, lambda: done.set_result(name)).start()
    return done


class Deferred:
    """The mark on methods of each kind."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    @deferred
    def bound(self, lib: str, to: str, x: int) -> Any:
        return import_module(lib).rpc_async(to, add, (self.offset, x))

    @classmethod
    @deferred
    def of_class(cls, lib: str, to: str, x: int) -> Any:
        return import_module(lib).rpc_async(to, add, (cls().offset, x))

    @staticmethod
    @deferred
    def static(lib: str, to: str, x: int) -> Any:
        return import_module(lib).rpc_async(to, add, (100, x))


def test_answers_are_futures_values(worker: Worker) -> None:
    for mode in MODES:
        before = worker.rpc.rpc_sync(worker.next, visits, (worker.lib, "add_there"))
        assert call(worker, mode, worker.next, add_there, (worker.lib, worker.after_next, 1, 2)) == 3
        assert worker.rpc.rpc_sync(worker.next, visits, (worker.lib, "add_there")) > before
        assert call(worker, mode, worker.next, add_then, (worker.lib, worker.after_next, 1, 2, 10)) == 13
        x = torch.ones(3)
        assert torch.equal(
            call(worker, mode, worker.next, add_there, (worker.lib, worker.after_next, x, x)), x * 2
        )
        assert call(worker, mode, worker.next, set_by_a_thread, (worker.lib,)) == worker.next


def test_methods_may_be_marked(worker: Worker) -> None:
    for mode in MODES:
        assert call(worker, mode, worker.next, Deferred.static, (worker.lib, worker.after_next, 1)) == 101
        assert call(worker, mode, worker.next, Deferred.of_class, (worker.lib, worker.after_next, 1)) == 1
        assert call(worker, mode, worker.next, Deferred(5).bound, (worker.lib, worker.after_next, 1)) == 6


def test_proxies_call_marked_methods(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Deferred, (7,))
    assert rref.rpc_sync().bound(worker.lib, worker.after_next, 1) == 8
    assert rref.rpc_async().bound(worker.lib, worker.after_next, 2).wait() == 9
    assert rref.remote().bound(worker.lib, worker.after_next, 3).to_here() == 10
    assert rref.rpc_sync().static(worker.lib, worker.after_next, 3) == 103
    assert rref.rpc_sync().of_class(worker.lib, worker.after_next, 3) == 3


def test_errors_arrive(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(Exception, match="at once"):
            call(worker, mode, worker.next, fail_at_once, ("at once",))
        with pytest.raises(Exception, match="later on"):
            call(worker, mode, worker.next, fail_later, (worker.lib, worker.after_next, "later on"))
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object, but got"):
            call(worker, mode, worker.next, no_future)
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


@with_options(num_worker_threads=1)
def test_no_thread_waits(worker: Worker) -> None:
    """With one thread a worker, a chain far longer than that goes round; all workers at once."""
    hops = [worker.next, worker.after_next, worker.name] * 10
    assert worker.rpc.rpc_sync(hops[0], add_chained, (worker.lib, hops[1:], 0)) == len(hops) - 1


@weft_only
def test_errors_keep_their_type(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="at once"):
            call(worker, mode, worker.next, fail_at_once, ("at once",))
        with pytest.raises(ValueError, match="later on"):
            call(worker, mode, worker.next, fail_later, (worker.lib, worker.after_next, "later on"))


@weft_only
def test_plain_calls_are_plain(worker: Worker) -> None:
    """Called here, a marked function is itself."""
    assert no_future() == 3
    assert Deferred(5).bound(WEFT, worker.next, 1).wait() == 6
