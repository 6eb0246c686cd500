"""Exceptions: which arrive, as what, and what is shown of where they come from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import weft
from tests.ranks import run_on
from tests.rpc.remote_functions import DetailedError, OwnError, StubbornError, add, fail_with, give
from tests.rpc.workers import MODES, Worker, call, shown, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


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


def test_own_types_arrive(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="some text") as caught:
            call(worker, mode, worker.next, fail_with, (ValueError, "some text"))
        assert type(caught.value) is ValueError
        with pytest.raises(ValueError, match="other text") as caught:
            call(worker, mode, worker.next, fail_deep_down, ("other text",))
        assert type(caught.value) is OwnError or not worker.is_weft  # torch may build its base
        assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


def test_the_remote_traceback_is_shown(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="look here") as caught:
            call(worker, mode, worker.next, fail_deep_down, ("look here",))
        text = shown(caught.value)
        assert f"On WorkerInfo(id={worker.next_rank}, name={worker.next})" in text
        assert "in deeper" in text
        assert "raise OwnError(text)" in text


def test_errors_go_through_workers(worker: Worker) -> None:
    with pytest.raises(ValueError, match="from afar") as caught:
        worker.rpc.rpc_sync(worker.next, fail_on, (worker.lib, worker.after_next, "from afar"))
    text = shown(caught.value)
    assert "in deeper" in text
    assert f"name={worker.next})" in text
    assert f"name={worker.after_next})" in text


def test_types_that_cant_be_built_are_told(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(RuntimeError, match="Failed to create original exception type") as caught:
            call(worker, mode, worker.next, fail_with, (StubbornError, True, "stubborn text"))
        assert "Original exception on remote side was" in str(caught.value)
        assert "stubborn text" in str(caught.value)


def test_futures_hold_errors(worker: Worker) -> None:
    future = worker.rpc.rpc_async(worker.next, fail_with, (ValueError, "kept"))
    for _ in range(2):
        with pytest.raises(ValueError, match="kept"):
            future.wait()
    assert future.done()
    with pytest.raises(ValueError, match="kept"):
        torch.futures.wait_all([worker.rpc.rpc_async(worker.next, add, (1, 2)), future])
    with pytest.raises(ValueError, match="in the block"), worker.rpc.api._wait_all():
        worker.rpc.rpc_async(worker.next, fail_with, (ValueError, "in the block"))


def test_what_cant_be_pickled_is_not_sent(worker: Worker) -> None:
    for way in [worker.rpc.rpc_sync, worker.rpc.rpc_async, worker.rpc.remote]:
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
            way(worker.next, give, (threading.Lock(),))
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


def test_results_that_cant_be_pickled_are_told(worker: Worker) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"cannot pickle '_thread\.lock' object"):
        worker.rpc.rpc_sync(worker.next, threading.Lock)
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


@weft_only
def test_errors_arrive_whole(worker: Worker) -> None:
    """Arguments and attributes; str() is what it was on the other side."""
    for mode in MODES:
        with pytest.raises(DetailedError) as caught:
            call(worker, mode, worker.next, fail_with, (DetailedError, 7, "seven"))
        error = caught.value
        assert (error.code, error.detail, error.later) == (7, "seven", [])
        assert error.args == (7, "seven")
        with pytest.raises(KeyError) as caught:
            call(worker, mode, worker.next, fail_with, (KeyError, "key"))
        assert caught.value.args == ("key",)
        assert str(caught.value) == "'key'"
        with pytest.raises(FileNotFoundError) as caught:
            call(worker, mode, worker.next, open, (f"/no/such/file/{worker.name}",))
        assert caught.value.errno == 2
        assert caught.value.filename == f"/no/such/file/{worker.name}"
        with pytest.raises(UnicodeDecodeError):
            call(worker, mode, worker.next, fail_with, (UnicodeDecodeError, "utf8", b"\xff", 0, 1, "bad"))


@weft_only
def test_the_cause_is_the_remote_traceback(worker: Worker) -> None:
    with pytest.raises(OwnError) as caught:
        worker.rpc.rpc_sync(worker.next, fail_deep_down, ("caused",))
    assert caught.value.__cause__ is not None
    assert "in deeper" in str(caught.value.__cause__)
    assert f"On WorkerInfo(id={worker.next_rank}, name={worker.next})" in str(caught.value.__cause__)


@weft_only
def test_causes_of_errors_are_shown(worker: Worker) -> None:
    with pytest.raises(OwnError) as caught:
        worker.rpc.rpc_sync(worker.next, fail_from_another)
    assert "KeyError" in shown(caught.value)
    assert "the first one" in shown(caught.value)


def fail_from_another() -> None:
    try:
        raise KeyError("the first one")
    except KeyError as error:
        raise OwnError("the second one") from error


@weft_only
def test_errors_that_cant_be_pickled_are_told(worker: Worker) -> None:
    for mode in MODES:
        with pytest.raises(RuntimeError, match="has a lock") as caught:
            call(worker, mode, worker.next, fail_with, (LockedError, "has a lock"))
        assert "LockedError" in shown(caught.value)
        with pytest.raises(RuntimeError, match="lock"):
            call(worker, mode, worker.next, fail_with_a_lock)


def fail_with_a_lock() -> None:
    raise OwnError(threading.Lock())


@weft_only
def test_groups_of_errors_arrive(worker: Worker) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        worker.rpc.rpc_sync(
            worker.next, fail_with, (ExceptionGroup, "many", [ValueError("a"), KeyError("b")])
        )
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


@weft_only
def test_handlers_that_want_to_exit_dont(worker: Worker) -> None:
    """Neither sys.exit nor an interrupt in a handler ends the worker, and the caller hears of it."""
    for kind in [SystemExit, KeyboardInterrupt, GeneratorExit]:
        error = error_of(
            lambda kind=kind: worker.rpc.rpc_sync(worker.next, fail_with, (kind, "enough"), timeout=20)
        )
        assert kind.__name__ in shown(error)
        assert "enough" in shown(error)
        assert not isinstance(error, TimeoutError)
        assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3
    error_of(lambda: worker.rpc.rpc_sync(worker.next, sys.exit, (0,), timeout=20))
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


def error_of(act: Callable[[], object]) -> BaseException:
    """What it raises, be it no Exception."""
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it returned")


@weft_only
def test_endless_recursion_is_an_error(worker: Worker) -> None:
    with pytest.raises(RecursionError):
        worker.rpc.rpc_sync(worker.next, recurse)
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


def recurse() -> None:
    recurse()


@run_on()
def test_weft_errors_are_what_they_are_in_torch() -> None:
    assert issubclass(weft.PeerError, RuntimeError)
    assert issubclass(weft.StateError, RuntimeError)
    assert issubclass(weft.PeerTimeoutError, TimeoutError)
