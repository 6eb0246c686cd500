"""What a collective of the local group returns, and who runs it.

A LocalWork is c10d's handle: `wait`, `is_completed`, `get_future`. A Lane runs a
group's collectives one after another, in the order in which they were called: a
call that is waited for at once runs on the caller's own thread (no handover), one
that overlaps with compute on the lane's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.futures import Future

from weft.errors import PeerTimeoutError


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

    def run(self, task: Callable[[float], None], timeout_secs: float) -> None:
        """Do the work, on whichever thread calls this."""
        task(timeout_secs)

    def finish(self, error: BaseException | None = None) -> None:
        """Called once by whoever ran the work."""
        with self._mutex:
            self._error = error
            self._is_done = True
            done, future = self._done, self._future
        if done is not None:
            done.set()
        if future is not None:
            self._complete(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the work is done; raise what went wrong in it."""
        if not self._is_done:
            self._block(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _block(self, timeout: timedelta | None) -> None:
        with self._mutex:
            if self._is_done:
                return
            if self._done is None:
                self._done = threading.Event()
            done = self._done
        secs = timeout.total_seconds() if timeout is not None else 0.0
        if not done.wait(secs if secs > 0 else None):
            raise PeerTimeoutError(f"{self._words} was not done within {secs} s; it goes on.")

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
            self._future = future = Future[list[torch.Tensor]]()
            is_done = self._is_done
        if is_done:
            self._complete(future)
        return future

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]


class Lane:
    """Runs the works of one group in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = threading.Lock()
        self._executing = threading.Lock()
        self._queue: SimpleQueue[tuple[LocalWork, Callable[[], None]] | None] = SimpleQueue()
        self._num_queued = 0
        self._thread: threading.Thread | None = None

    def submit(self, work: LocalWork, task: Callable[[], None], *, is_async: bool) -> LocalWork:
        """Run the task now on this thread, or on the lane's when works are queued or `is_async`."""
        with self._state:
            is_inline = not is_async and not self._num_queued and self._executing.acquire(blocking=False)
            if not is_inline:
                self._num_queued += 1
                self._queue.put((work, task))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
        if is_inline:
            try:
                _run(work, task)
            finally:
                self._executing.release()
        return work

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._executing:
                _run(*item)
            del item  # its tensors, before the next wait
            with self._state:
                self._num_queued -= 1

    def close(self) -> None:
        """Let the lane's thread end once its queue is empty, and wait for it."""
        with self._state:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()


def _run(work: LocalWork, task: Callable[[], None]) -> None:
    try:
        # Collectives write into tensors behind autograd's back, as all of c10d's do; in
        # inference mode they may write into tensors made in it or outside of it.
        with torch.inference_mode():
            task()
    except BaseException as error:
        work.finish(error)
        if not isinstance(error, Exception):
            raise
    else:
        work.finish()
