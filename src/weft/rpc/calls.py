"""Calls that wait for their answer.

A call is answered once: by a message, or by an error (a timeout, a dead worker, a shutdown). Whoever takes it
out of the table answers it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from weft.errors import PeerTimeoutError, StateError
from weft.rpc.failures import fresh_copy
from weft.rpc.packing import PACKED_NONE
from weft.rpc.wire import Kind, Message
from weft.rpc.workers import WorkerInfo

Answer = Message | BaseException
Blocking = Callable[[], AbstractContextManager[None]]


class Call:
    """A call on its way. `what` says which, for errors: "rpc_sync of torch.add"."""

    id = 0
    is_internal = False  # weft's own: it does not keep a shutdown waiting
    sees_to_itself = False  # its caller looks at the clock

    def __init__(self, to: WorkerInfo, what: str | Callable[[], str], timeout_secs: float) -> None:
        self.to = to
        self._what = what
        self.timeout_secs = timeout_secs  # 0: none
        self.ends_at = time.monotonic() + timeout_secs if timeout_secs else float("inf")

    @property
    def what(self) -> str:
        """Which call it is, in words."""
        return self._what if isinstance(self._what, str) else self._what()

    @property
    def deadline(self) -> float | None:
        """When the clock must answer it; None for never."""
        return None if self.sees_to_itself or self.ends_at == float("inf") else self.ends_at

    def answer(self, answer: Answer) -> Callable[[], None] | None:
        """Take the answer. Must not wait; what would is returned as a job."""
        raise NotImplementedError

    def timeout_error(self) -> PeerTimeoutError:
        """What the caller sees when no answer came in time."""
        return PeerTimeoutError(
            f"RPC ran for more than set timeout ({self.timeout_secs * 1000:g} ms) and will now be marked "
            f"with an error: {self.what} on worker '{self.to.name}' (id {self.to.id}) has not answered. It "
            "may still run there. Give it more time (timeout=), or see what that worker does.",
            [self.to.id],
        )


class Waiter:
    """Somebody who waits for an answer on the spot, and decodes it."""

    reply: Answer | None = None
    when_answered: Callable[[], None] | None = None  # told if another thread answers

    def __init__(self, ends_at: float = float("inf")) -> None:
        self.ends_at = ends_at  # until when to wait
        self._answered = threading.Lock()
        self._answered.acquire()
        self._caller = threading.get_ident()

    def answer(self, answer: Answer) -> None:
        """Take the answer and wake the caller."""
        self.reply = answer
        self._answered.release()
        if self.when_answered is not None and threading.get_ident() != self._caller:
            self.when_answered()

    def left_secs(self) -> float:
        """How long the caller will still wait."""
        return self.ends_at - time.monotonic()

    def wait(self) -> bool:
        """Whether the answer came in time."""
        left_secs = self.left_secs()
        return self._answered.acquire(timeout=-1 if left_secs == float("inf") else max(0.0, left_secs))


class SyncCall(Waiter, Call):
    """A call whose caller waits for it."""

    sees_to_itself = True

    def __init__(self, to: WorkerInfo, what: str | Callable[[], str], timeout_secs: float) -> None:
        Call.__init__(self, to, what, timeout_secs)
        Waiter.__init__(self, self.ends_at)


LOOK_AGAIN = StateError("something has come")  # any answer ends a wait


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. Waiting for it in a handler does not use up a thread of the pool.

    Whoever waits for it first takes messages meanwhile (`listen`), and opens its answer.
    """

    def __init__(
        self,
        blocking: Blocking,
        listen: Callable[[Waiter], object] | None = None,
        open_answer: Callable[[Answer], Any] | None = None,
    ) -> None:
        super().__init__()
        self._blocking = blocking
        self._listen = listen
        self._open_answer = open_answer
        self._gate = threading.Lock()
        self._has_callbacks = False
        self._waiter: Waiter | None = None

    def wait(self) -> Any:
        """The result, or the error raised."""
        if not self.done() and not self._wait_listening():
            with self._blocking():
                return super().wait()
        return super().wait()

    def _wait_listening(self) -> bool:
        """Wait until it is done, as the one who takes its answer; False where another one does."""
        listen, open_answer = self._listen, self._open_answer
        if listen is None or open_answer is None:
            return False
        waiter = Waiter()
        with self._gate:
            if self._waiter is not None:
                return False
            if self.done():
                return True
            self._waiter = waiter
        try:
            listen(waiter)
        finally:  # whatever ended the wait: an answer that was handed over is this thread's to open
            with self._gate:
                if self._waiter is waiter:
                    self._waiter = None
            reply = waiter.reply
            if reply is not None and reply is not LOOK_AGAIN:
                self.settle(lambda: open_answer(reply))
        return True

    def hand_over(self, answer: Answer) -> bool:
        """Give the answer to whoever waits for it; False where nobody does."""
        if self._has_callbacks:  # which are for the pool
            return False
        waiter = self._take_waiter()
        if waiter is not None:
            waiter.answer(answer)
        return waiter is not None

    def _take_waiter(self) -> Waiter | None:
        with self._gate:
            waiter, self._waiter = self._waiter, None
            return waiter

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        """As torch's: a future of what `callback` returns."""
        with self._gate:
            self._has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """As torch's: run `callback` when this future is done."""
        with self._gate:
            self._has_callbacks = True
        super().add_done_callback(callback)

    def complete(self, outcome: Callable[[], Any]) -> Callable[[], None] | None:
        """Set what `outcome` returns or raises; as a job where callbacks, which may wait, are to run."""
        with self._gate:
            if self._has_callbacks:
                return lambda: self.settle(outcome)
            self._set(outcome)
        self._wake()
        return None

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Set what `outcome` returns or raises, and run the callbacks."""
        self._set(outcome)
        self._wake()

    def _set(self, outcome: Callable[[], Any]) -> None:
        try:
            value = outcome()
        except BaseException as error:
            # Each wait raises a copy: the error itself would hold the frames of whoever waited.
            self._set_unwrap_func(_raise_copy)
            self.set_result(error.with_traceback(None))
        else:
            self.set_result(value)

    def _wake(self) -> None:
        waiter = self._take_waiter()
        if waiter is not None:
            waiter.answer(LOOK_AGAIN)


def _raise_copy(error: BaseException) -> None:
    raise fresh_copy(error)


def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
    """A future of these futures when all are done; of the first error as soon as there is one."""
    collected: torch.futures.Future[Any] = torch.futures.Future()
    lock = threading.Lock()
    num_left = len(futures)

    def count(future: torch.futures.Future[Any]) -> None:
        nonlocal num_left
        error: Exception | None = None
        try:
            future.value()
        except Exception as failed:
            error = failed
        with lock:
            is_last = num_left == 1 or (error is not None and num_left > 0)
            num_left = 0 if is_last else num_left - 1
        if error is not None and is_last:
            collected.set_exception(error)
        elif is_last:
            collected.set_result(list(futures))

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        collected.set_result([])
    return collected


class AsyncCall(Call):
    """A call with a future."""

    def __init__(
        self,
        to: WorkerInfo,
        what: str | Callable[[], str],
        timeout_secs: float,
        future: CallFuture,
        open_answer: Callable[[Answer], Any],
    ) -> None:
        super().__init__(to, what, timeout_secs)
        self.future = future
        self.when_failed: Callable[[BaseException], None] | None = None  # to be told at once
        self._open_answer = open_answer

    def answer(self, answer: Answer) -> Callable[[], None] | None:
        """Complete the future: here if that runs nobody's code, else in a job."""
        if isinstance(answer, BaseException):
            if self.when_failed is not None:
                self.when_failed(answer)
            return self.future.complete(lambda: self._open_answer(answer))
        if answer.kind is Kind.RESULT and answer.body == PACKED_NONE:
            return self.future.complete(_none)
        if self.future.hand_over(answer):
            return None
        return lambda: self.future.settle(lambda: self._open_answer(answer))


class CreationCall(Call):
    """The call that makes the value of an RRef. Nobody waits for it, as a rule: it has a future on demand."""

    def __init__(
        self, to: WorkerInfo, what: str | Callable[[], str], timeout_secs: float, blocking: Blocking
    ) -> None:
        super().__init__(to, what, timeout_secs)
        self.is_done = False
        self.error: BaseException | None = None
        self.when_failed: Callable[[BaseException], None] | None = None  # to be told at once
        self._blocking = blocking
        self._future: CallFuture | None = None
        self._gate = threading.Lock()

    def answer(self, answer: Answer) -> Callable[[], None] | None:
        """Note that the value is there, or why it will not be. What it is stays with its owner."""
        with self._gate:
            self.error = answer if isinstance(answer, BaseException) else None
            self.is_done = True
            future = self._future
        if self.error is not None and self.when_failed is not None:
            self.when_failed(self.error)
        return None if future is None else future.complete(self._outcome)

    def future(self) -> CallFuture:
        """A future of the answer."""
        with self._gate:
            is_late = self._future is None and self.is_done  # else the answer completes it
            future = self._future = self._future or CallFuture(self._blocking)
        if is_late:
            future.settle(self._outcome)
        return future

    def _outcome(self) -> None:
        if self.error is not None:
            raise self.error


def _none() -> None:
    """The outcome of a call that returned None."""


class CallTable:
    """The calls of one agent that have no answer yet."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        # A worker that takes a dead one's place must not get answers to the dead one's calls.
        self._ids = itertools.count(secrets.randbits(62))
        self.num_started_by_users = 0  # it only has to change when there are more

    def add(self, call: Call) -> None:
        """Give the call an id and keep it."""
        call.id = next(self._ids)
        if not call.is_internal:
            self.num_started_by_users = call.id
        self._calls[call.id] = call

    def take(self, call_id: int) -> Call | None:
        """Take a call out, to answer it; None when somebody else did."""
        return self._calls.pop(call_id, None)

    def take_all(self, chosen: Callable[[Call], bool]) -> list[Call]:
        """Take out the calls that are chosen."""
        taken = [self.take(call.id) for call in list(self._calls.values()) if chosen(call)]
        return [call for call in taken if call is not None]

    def next_deadline(self) -> float | None:
        """When the first of them runs out of time."""
        deadlines = [call.deadline for call in list(self._calls.values()) if call.deadline is not None]
        return min(deadlines, default=None)

    @property
    def num_open(self) -> int:
        """How many of the users' own calls have no answer."""
        return sum(not call.is_internal for call in list(self._calls.values()))

    def describe(self) -> str:
        """The open calls, for an error."""
        calls = [call for call in list(self._calls.values()) if not call.is_internal]
        shown = ", ".join(f"{call.what} on '{call.to.name}'" for call in calls[:5])
        return f"{shown} and {len(calls) - 5} more" if len(calls) > 5 else shown
