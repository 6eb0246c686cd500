"""What a collective of the local group returns, and who runs it.

A LocalWork is c10d's handle: `wait`, `is_completed`, `get_future`. A Lane runs a
group's collectives one after another, in the order in which they were called: a
call that is waited for at once runs on the caller's own thread (no handover between
threads), one that overlaps with compute on the lane's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from weft.errors import PeerTimeoutError

_CLOSE_SECS = 1.0
# Waking a thread costs its caller tens of microseconds, for nothing where callers wait at
# once and run their works themselves. While they do, the lane's thread is not woken but
# glances at its queue now and then; a work that nobody waits for begins that much later,
# and the next one at once.
_ALERT_SECS = 0.02
_GLANCE_SECS = 0.001


class LocalWork(dist.Work):
    """One collective under way, or done."""

    def __init__(self, words: str, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._words = words
        self._results = list(results)
        self._error: BaseException | None = None
        self._is_done = False
        self._mutex = threading.Lock()
        self._done: threading.Event | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self.lane: Lane | None = None  # where it waits to be run
        self.end_secs = 0.0  # when it was done, by time.perf_counter

    def run(self, task: Callable[[float], None], timeout_secs: float) -> None:
        """Do the work, on whichever thread calls this."""
        if self._results and self._results[0].is_inference():
            with torch.inference_mode():  # the only place where such tensors may be written
                task(timeout_secs)
        else:
            task(timeout_secs)

    def before_queue(self) -> None:
        """Called on the caller's thread when the work is to run later, on another."""

    def finish(self, error: BaseException | None = None) -> None:
        """Called once by whoever ran the work."""
        with self._mutex:
            self._error = error
            self.end_secs = time.perf_counter()
            self._is_done = True
            done, future = self._done, self._future
        if done is not None:
            done.set()
        if future is not None:
            # On a thread of its own: what hangs on the future may wait for the works behind this one.
            threading.Thread(target=self._complete, args=(future,), name="weft-future", daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the work is done; raise what went wrong in it."""
        if not self._is_done:
            if self.lane is not None and timeout is None:
                self.lane.run_until(self.is_completed)
            self._block(timeout)
        if self._error is not None:
            raise self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Order what the caller does next behind the result: nothing to do on the CPU."""

    def _block(self, timeout: timedelta | None) -> None:
        with self._mutex:
            if self._is_done:
                return
            if self._done is None:
                self._done = threading.Event()
            done = self._done
        secs = timeout.total_seconds() if timeout is not None else 0.0
        if not done.wait(secs if secs > 0 else None):
            late = self.lane.late_ranks() if self.lane is not None else []
            raise PeerTimeoutError(
                f"{self._words} was not done within {secs:g} s. Not arrived: ranks {late}. It goes on; wait "
                "again for it, or look at what these ranks do.",
                late,
            )

    def is_completed(self) -> bool:
        """Whether the work is done, well or not."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether the work is done and went well."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if something did."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the outcome."""
        return self._results

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the result."""
        with self._mutex:
            if self._future is not None:
                return self._future
            self._future = future = self._new_future()
            is_done = self._is_done
        if is_done:
            self._complete(future)
        return future

    def _new_future(self) -> Future[list[torch.Tensor]]:
        return Future()

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]


class Lane:
    """Runs the works of one group in order.

    A work is run by whoever comes first: its caller, when nothing is before it and
    the caller would only wait; the lane's thread; or the first to wait for it, who
    then takes it over together with the works before it.
    """

    def __init__(self, name: str, late_ranks: Callable[[], list[int]]) -> None:
        self._name = name
        self.late_ranks = late_ranks  # those that the work under way waits for
        self._executing = threading.Lock()  # held while a work runs
        self._waiting: deque[tuple[LocalWork, Callable[[], None]]] = deque()
        self._ringing = threading.Lock()
        self._bell = threading.Lock()  # held; released once to wake the thread
        self._bell.acquire()
        self._is_asleep = False
        self._is_taken_over = False  # the last work was run by the one who waited for it
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, work: LocalWork, task: Callable[[], None], *, is_async: bool) -> None:
        """Run the task now if it is waited for at once and nothing is before it; else queue it."""
        if not is_async and self._executing.acquire(blocking=False):
            try:
                if not self._waiting:
                    _run(work, task)
                    return
            finally:
                self._executing.release()
        work.lane = self
        work.before_queue()
        self._waiting.append((work, task))
        if self._thread is None:
            self._start_thread()
        elif self._is_asleep or not self._is_taken_over:
            self._ring()

    def _start_thread(self) -> None:
        with self._ringing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()

    def _ring(self) -> None:
        with self._ringing:  # callers may be several threads
            if self._bell.locked():
                self._bell.release()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run waiting works on this thread until `is_done`, or until another thread is at it."""
        while not is_done() and self._executing.acquire(blocking=False):
            try:
                if not self._waiting:
                    return
                self._is_taken_over = True
                _run(*self._waiting.popleft())
            finally:
                self._executing.release()

    def _serve(self) -> None:
        alert_until = 0.0
        while not self._is_closed:
            if self._waiting:
                with self._executing:
                    if self._waiting:
                        self._is_taken_over = False
                        _run(*self._waiting.popleft())
                alert_until = time.monotonic() + _ALERT_SECS
            elif time.monotonic() < alert_until:
                self._bell.acquire(timeout=_GLANCE_SECS)
            else:
                self._is_asleep = True
                if not self._waiting and not self._is_closed:  # looked at again: a submit rings only sleepers
                    self._bell.acquire()
                self._is_asleep = False
                alert_until = time.monotonic() + _ALERT_SECS

    def close(self, abort: Callable[[str], None]) -> None:
        """Let the works under way end, then the lane's thread.

        Works that are not done within a second, since a peer doesn't come, are aborted.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        drained = LocalWork("close", [])
        self.submit(drained, _nothing, is_async=True)
        try:
            drained.wait(timedelta(seconds=_CLOSE_SECS))
        except PeerTimeoutError:
            abort("it was destroyed while collectives were under way")
            drained.wait()
        self._is_closed = True
        self._ring()
        thread.join()
        self._thread = None


def _nothing() -> None:
    pass


def _run(work: LocalWork, task: Callable[[], None]) -> None:
    try:
        task()
    except BaseException as error:
        work.finish(error)
        if not isinstance(error, Exception):
            raise
    else:
        work.finish()
