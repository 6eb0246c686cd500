"""Exceptions: which arrive, as what, and what is shown of where they come from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module

import pytest

from tests.rpc.remote_functions import DetailedError, OwnError, StubbornError, add, fail_with, give
from tests.rpc.workers import MODES, call
from tests.rpc_bodies.running import Worker, shown


class LockedError(ValueError):
    """Can't be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail_deep_down(text: str) -> None:
    def deeper() -> None:
        raise OwnError(text)

    deeper()


def fail_on(lib: str, to: str, text: str) -> None:
    import_module(lib).rpc_sync(to, fail_deep_down, (text,))


def own_types_arrive(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="some text") as caught:
            call(w, mode, w.next, fail_with, (ValueError, "some text"))
        assert type(caught.value) is ValueError
        with pytest.raises(ValueError, match="other text") as caught:
            call(w, mode, w.next, fail_deep_down, ("other text",))
        assert type(caught.value) is OwnError or not w.is_weft  # torch may build its base
        assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def the_remote_traceback_is_shown(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="look here") as caught:
            call(w, mode, w.next, fail_deep_down, ("look here",))
        text = shown(caught.value)
        assert f"On WorkerInfo(id={w.next_rank}, name={w.next})" in text
        assert "in deeper" in text
        assert "raise OwnError(text)" in text


def errors_go_through_workers(w: Worker) -> None:
    with pytest.raises(ValueError, match="from afar") as caught:
        w.rpc.rpc_sync(w.next, fail_on, (w.lib, w.after_next, "from afar"))
    text = shown(caught.value)
    assert "in deeper" in text
    assert f"name={w.next})" in text
    assert f"name={w.after_next})" in text


def types_that_cant_be_built(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(RuntimeError, match="Failed to create original exception type") as caught:
            call(w, mode, w.next, fail_with, (StubbornError, True, "stubborn text"))
        assert "Original exception on remote side was" in str(caught.value)
        assert "stubborn text" in str(caught.value)


def futures_hold_errors(w: Worker) -> None:
    import torch

    future = w.rpc.rpc_async(w.next, fail_with, (ValueError, "kept"))
    for _ in range(2):
        with pytest.raises(ValueError, match="kept"):
            future.wait()
    assert future.done()
    with pytest.raises(ValueError, match="kept"):
        torch.futures.wait_all([w.rpc.rpc_async(w.next, add, (1, 2)), future])
    with pytest.raises(ValueError, match="in the block"), w.rpc.api._wait_all():
        w.rpc.rpc_async(w.next, fail_with, (ValueError, "in the block"))


def what_cant_be_pickled_is_not_sent(w: Worker) -> None:
    for way in [w.rpc.rpc_sync, w.rpc.rpc_async, w.rpc.remote]:
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
            way(w.next, give, (threading.Lock(),))
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def results_that_cant_be_pickled(w: Worker) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"cannot pickle '_thread\.lock' object"):
        w.rpc.rpc_sync(w.next, threading.Lock)
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def errors_arrive_whole(w: Worker) -> None:
    """Arguments and attributes; str() is what it was on the other side."""
    for mode in MODES:
        with pytest.raises(DetailedError) as caught:
            call(w, mode, w.next, fail_with, (DetailedError, 7, "seven"))
        error = caught.value
        assert (error.code, error.detail, error.later) == (7, "seven", [])
        assert error.args == (7, "seven")
        with pytest.raises(KeyError) as caught:
            call(w, mode, w.next, fail_with, (KeyError, "key"))
        assert caught.value.args == ("key",)
        assert str(caught.value) == "'key'"
        with pytest.raises(FileNotFoundError) as caught:
            call(w, mode, w.next, open, (f"/no/such/file/{w.name}",))
        assert caught.value.errno == 2
        assert caught.value.filename == f"/no/such/file/{w.name}"
        with pytest.raises(UnicodeDecodeError):
            call(w, mode, w.next, fail_with, (UnicodeDecodeError, "utf8", b"\xff", 0, 1, "bad"))


def the_cause_is_the_remote_traceback(w: Worker) -> None:
    with pytest.raises(OwnError) as caught:
        w.rpc.rpc_sync(w.next, fail_deep_down, ("caused",))
    assert caught.value.__cause__ is not None
    assert "in deeper" in str(caught.value.__cause__)
    assert f"On WorkerInfo(id={w.next_rank}, name={w.next})" in str(caught.value.__cause__)


def causes_of_errors_are_shown(w: Worker) -> None:
    with pytest.raises(OwnError) as caught:
        w.rpc.rpc_sync(w.next, fail_from_another)
    assert "KeyError" in shown(caught.value)
    assert "the first one" in shown(caught.value)


def fail_from_another() -> None:
    try:
        raise KeyError("the first one")
    except KeyError as error:
        raise OwnError("the second one") from error


def errors_that_cant_be_pickled(w: Worker) -> None:
    for mode in MODES:
        with pytest.raises(RuntimeError, match="has a lock") as caught:
            call(w, mode, w.next, fail_with, (LockedError, "has a lock"))
        assert "LockedError" in shown(caught.value)
        with pytest.raises(RuntimeError, match="lock"):
            call(w, mode, w.next, fail_with_a_lock)


def fail_with_a_lock() -> None:
    raise OwnError(threading.Lock())


def groups_of_errors(w: Worker) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        w.rpc.rpc_sync(w.next, fail_with, (ExceptionGroup, "many", [ValueError("a"), KeyError("b")]))
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


def handlers_that_want_to_exit(w: Worker) -> None:
    """Neither sys.exit nor an interrupt in a handler ends the worker, and the caller hears of it."""
    for kind in [SystemExit, KeyboardInterrupt, GeneratorExit]:
        error = error_of(lambda kind=kind: w.rpc.rpc_sync(w.next, fail_with, (kind, "enough"), timeout=20))
        assert kind.__name__ in shown(error)
        assert "enough" in shown(error)
        assert not isinstance(error, TimeoutError)
        assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3
    error_of(lambda: w.rpc.rpc_sync(w.next, sys.exit, (0,), timeout=20))
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def error_of(act: Callable[[], object]) -> BaseException:
    """What it raises, be it no Exception."""
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it returned")


def endless_recursion(w: Worker) -> None:
    with pytest.raises(RecursionError):
        w.rpc.rpc_sync(w.next, recurse)
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def recurse() -> None:
    recurse()


BODIES = [
    own_types_arrive,
    the_remote_traceback_is_shown,
    errors_go_through_workers,
    types_that_cant_be_built,
    futures_hold_errors,
    what_cant_be_pickled_is_not_sent,
    results_that_cant_be_pickled,
]
WEFT_ONLY = [
    errors_arrive_whole,
    the_cause_is_the_remote_traceback,
    causes_of_errors_are_shown,
    errors_that_cant_be_pickled,
    groups_of_errors,
    handlers_that_want_to_exit,
    endless_recursion,
]
