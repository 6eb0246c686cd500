"""functions.async_execution: the handler's answer is a future, and its thread is free meanwhile."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.rpc.remote_functions import deferred, fail_with
from tests.rpc.workers import MODES, call
from tests.rpc_bodies.places import add, count, me, visits
from tests.rpc_bodies.running import WEFT, Worker


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


def answers_are_futures_values(w: Worker) -> None:
    for mode in MODES:
        before = w.rpc.rpc_sync(w.next, visits, (w.lib, "add_there"))
        assert call(w, mode, w.next, add_there, (w.lib, w.after_next, 1, 2)) == 3
        assert w.rpc.rpc_sync(w.next, visits, (w.lib, "add_there")) > before
        assert call(w, mode, w.next, add_then, (w.lib, w.after_next, 1, 2, 10)) == 13
        x = torch.ones(3)
        assert torch.equal(call(w, mode, w.next, add_there, (w.lib, w.after_next, x, x)), x * 2)
        assert call(w, mode, w.next, set_by_a_thread, (w.lib,)) == w.next


def methods(w: Worker) -> None:
    for mode in MODES:
        assert call(w, mode, w.next, Deferred.static, (w.lib, w.after_next, 1)) == 101
        assert call(w, mode, w.next, Deferred.of_class, (w.lib, w.after_next, 1)) == 1
        assert call(w, mode, w.next, Deferred(5).bound, (w.lib, w.after_next, 1)) == 6


def proxies(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Deferred, (7,))
    assert rref.rpc_sync().bound(w.lib, w.after_next, 1) == 8
    assert rref.rpc_async().bound(w.lib, w.after_next, 2).wait() == 9
    assert rref.remote().bound(w.lib, w.after_next, 3).to_here() == 10
    assert rref.rpc_sync().static(w.lib, w.after_next, 3) == 103
    assert rref.rpc_sync().of_class(w.lib, w.after_next, 3) == 3


def errors(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(Exception, match="at once"):
            call(w, mode, w.next, fail_at_once, ("at once",))
        with pytest.raises(Exception, match="later on"):
            call(w, mode, w.next, fail_later, (w.lib, w.after_next, "later on"))
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object, but got"):
            call(w, mode, w.next, no_future)
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def no_thread_waits(w: Worker) -> None:
    """With one thread a worker, a chain far longer than that goes round; all workers at once."""
    hops = [w.next, w.after_next, w.name] * 10
    assert w.rpc.rpc_sync(hops[0], add_chained, (w.lib, hops[1:], 0)) == len(hops) - 1


def errors_keep_their_type(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="at once"):
            call(w, mode, w.next, fail_at_once, ("at once",))
        with pytest.raises(ValueError, match="later on"):
            call(w, mode, w.next, fail_later, (w.lib, w.after_next, "later on"))


def plain_calls_are_plain(w: Worker) -> None:
    """Called here, a marked function is itself."""
    assert no_future() == 3
    assert Deferred(5).bound(WEFT, w.next, 1).wait() == 6


BODIES = [answers_are_futures_values, methods, proxies, errors]
WEFT_ONLY = [errors_keep_their_type, plain_calls_are_plain]
ONE_THREAD = [no_thread_waits]  # with num_worker_threads=1
