"""The threads that hear messages and run what they ask for.

Idle threads sleep on the bell; a message wakes one of them, which takes it and does itself what it asks for:
no hand-over on the way. Taking is done by one thread at a time and never waits. The last thread that is not
busy runs nothing: it puts jobs on a backlog and keeps hearing, so that answers are heard whatever the
handlers do.

A handler that waits for a call of its own says so (`blocking`) and does not count against the limit, so
nested calls never run out of threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

Job = Callable[[], None]


class Ear(Protocol):
    """Where messages come in."""

    is_closing: bool

    def signal(self) -> int:
        """A number that changes when a message comes, to be read before `take`."""
        ...

    def take(self) -> Any | None:
        """The next message, if there is one. One thread at a time."""
        ...

    def sleep(self, signal: int) -> None:
        """Sleep until the signal is another one. A message wakes one of the sleepers."""
        ...

    def wake(self) -> None:
        """Wake a sleeper."""
        ...


class _Mine(threading.local):
    is_worker = False


class Pool:
    """Threads that run `accept` on each message that the ear takes, and the job that it returns.

    `accept` must not wait; it is called in the order of the messages. `enter` is called first on each thread.
    Neither a job nor `accept` may raise.
    """

    def __init__(
        self, ear: Ear, accept: Callable[[Any], Job | None], enter: Callable[[], None], limit: int
    ) -> None:
        self._ear = ear
        self._accept = accept
        self._enter = enter
        self._limit = limit
        self._taking = threading.Lock()
        self._lock = threading.Lock()  # of all that follows
        self._backlog: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_free = 0  # threads that run no job
        self._num_blocked = 0
        self._num_busy = 0
        self._mine = _Mine()

    def start(self) -> None:
        """Start to hear."""
        with self._lock:
            for _ in range(2):  # one runs what comes, one is there to hear the next
                self._add_thread()

    @property
    def num_threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def num_busy(self) -> int:
        """How many jobs are running or waiting for a thread."""
        return self._num_busy

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="weft-rpc-worker", daemon=True)
        self._threads.add(thread)
        self._num_free += 1
        thread.start()

    def _run(self) -> None:
        self._mine.is_worker = True
        self._enter()
        while True:
            job = self._next_job()
            if job is None:
                return
            job()
            del job  # what it holds must not live until the next one comes
            with self._lock:
                self._num_busy -= 1
                self._num_free += 1

    def _next_job(self) -> Job | None:
        """The next job for this thread; None when it is not needed any more."""
        ear = self._ear
        while True:
            signal = ear.signal()
            job = self._take_job()
            if job is not None:
                return job
            with self._lock:
                if self._backlog and self._may_work():
                    self._num_free -= 1
                    return self._backlog.popleft()
                if ear.is_closing or len(self._threads) - self._num_blocked > self._limit + 1:
                    self._threads.discard(threading.current_thread())
                    self._num_free -= 1
                    break
            ear.sleep(signal)
        ear.wake()  # the next one is to end too, or to hear in this one's place
        return None

    def _take_job(self) -> Job | None:
        """Take messages until there is a job for this thread, or no message."""
        while True:
            with self._taking:
                message = self._ear.take()
                if message is None:
                    return None
                job = self._accept(message)
                del message
            if job is not None:
                with self._lock:
                    self._num_busy += 1
                    if self._may_work():
                        self._num_free -= 1
                        return job
                    self._backlog.append(job)
                del job

    def _may_work(self) -> bool:
        """Whether this thread may do a job: another one must be free to hear. The lock is held."""
        if self._num_free <= 1 and len(self._threads) - self._num_blocked <= self._limit:
            self._add_thread()
        return self._num_free > 1

    @contextmanager
    def blocking(self) -> Generator[None]:
        """Say that this thread waits for another worker, or for another thread's call, inside."""
        if not self._mine.is_worker:
            yield
            return
        with self._lock:
            self._num_blocked += 1
            if self._backlog:
                self._add_thread()
        try:
            yield
        finally:
            with self._lock:
                self._num_blocked -= 1

    def join(self, timeout_secs: float) -> None:
        """Wait until the threads have ended, all but the caller's own. The ear must be closing."""
        deadline = time.monotonic() + timeout_secs
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
