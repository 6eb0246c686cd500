"""Futures of calls: who opens the answer, and that nobody waits for ever."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest

from weft.rpc.calls import Answer, AsyncCall, CallFuture, Waiter
from weft.rpc.wire import Kind, Message
from weft.rpc.workers import WorkerInfo

SECS = 20.0
ANSWER = Message(Kind.RESULT, 1, 0, 0, b"seven")


class Caller:
    """A call, and the threads that opened its answer."""

    def __init__(self) -> None:
        self.listening = threading.Semaphore(0)
        self.opened_by: list[int] = []
        self.future = CallFuture(nullcontext, self.listen, self.open_answer)
        self.call = AsyncCall(WorkerInfo("worker", 1), "a call", 0, self.future, self.open_answer)

    def listen(self, waiter: Waiter) -> bool:
        self.listening.release()
        return waiter.wait()

    def open_answer(self, answer: Answer) -> Any:
        self.opened_by.append(threading.get_ident())
        if isinstance(answer, BaseException):
            raise answer
        return 7

    def wait_elsewhere(self) -> tuple[threading.Thread, list[Any]]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(self.future.wait()), daemon=True)
        thread.start()
        return thread, results


def test_who_waits_opens_the_answer() -> None:
    caller = Caller()
    thread, results = caller.wait_elsewhere()
    assert caller.listening.acquire(timeout=SECS)
    assert caller.call.answer(ANSWER) is None
    thread.join(SECS)
    assert results == [7]
    assert caller.opened_by == [thread.ident]


def test_where_nobody_waits_the_answer_is_a_job() -> None:
    caller = Caller()
    job = caller.call.answer(ANSWER)
    assert job is not None
    assert not caller.future.done()
    thread, results = caller.wait_elsewhere()  # it comes when the answer has, and hears of the job's end
    assert caller.listening.acquire(timeout=SECS)
    job()
    thread.join(SECS)
    assert results == [7]
    assert caller.opened_by == [threading.get_ident()]


def test_callbacks_are_for_the_pool() -> None:
    caller = Caller()
    seen: list[int] = []
    caller.future.add_done_callback(lambda future: seen.append(future.value()))
    thread, results = caller.wait_elsewhere()
    assert caller.listening.acquire(timeout=SECS)
    job = caller.call.answer(ANSWER)
    assert job is not None
    job()
    thread.join(SECS)
    assert (results, seen) == ([7], [7])


def test_several_wait() -> None:
    caller = Caller()
    waiting = [caller.wait_elsewhere() for _ in range(4)]
    assert caller.listening.acquire(timeout=SECS)
    assert caller.call.answer(ANSWER) is None
    for thread, results in waiting:
        thread.join(SECS)
        assert results == [7]
    assert len(caller.opened_by) == 1


def test_a_wait_that_is_broken_off_leaves_the_answer_to_others() -> None:
    caller = Caller()
    caller.future._listen = _interrupt
    with pytest.raises(KeyboardInterrupt):
        caller.future.wait()
    job = caller.call.answer(ANSWER)
    assert job is not None
    job()
    assert caller.future.wait() == 7


def _interrupt(_: Waiter) -> bool:
    raise KeyboardInterrupt


def test_errors_end_the_wait() -> None:
    caller = Caller()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            caller.future.wait()
        except TimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert caller.listening.acquire(timeout=SECS)
    assert caller.call.answer(caller.call.timeout_error()) is None
    thread.join(SECS)
    assert len(caught) == 1
