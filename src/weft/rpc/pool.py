"""The threads that hear messages and run what they ask for.

One thread leads: it alone hears. When a message asks for work, the leader hands the lead to an idle thread
and does the work itself, so that a call costs no hand-over on its way in. When every thread is busy the
leader keeps hearing and puts the work on a backlog: answers are heard whatever the handlers do.

A handler that waits for a call of its own says so (`blocking`) and does not count against the limit, so
nested calls never run out of threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

Job = Callable[[], None]
_Heard = TypeVar("_Heard")


class _Mine(threading.local):
    is_worker = False
    is_leading = False


class Pool:
    """Threads that run `accept` on each message that `hear` brings, and the job that it returns.

    `hear` waits for a message and returns None at the end; `accept` must not wait. `enter` is called
    first on each thread. Neither a job nor `accept` may raise.
    """

    def __init__(
        self,
        hear: Callable[[], Any],
        accept: Callable[[Any], Job | None],
        enter: Callable[[], None],
        limit: int,
    ) -> None:
        self._hear = hear
        self._accept = accept
        self._enter = enter
        self._limit = limit
        self._lead = threading.Lock()
        self._lock = threading.Lock()  # of all that follows
        self._backlog: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_blocked = 0
        self._num_busy = 0
        self._is_ended = False
        self._mine = _Mine()

    def start(self) -> None:
        """Start to hear."""
        with self._lock:
            for _ in range(2):  # one hears, one is ready to take over
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

    def _next_job(self) -> Job | None:
        """The next job for this thread; None when it is not needed any more."""
        while True:
            with self._lock:
                if self._backlog:
                    return self._backlog.popleft()
                if self._is_ended or len(self._threads) - self._num_blocked > self._limit:
                    self._threads.discard(threading.current_thread())
                    return None
                self._num_idle += 1
            self._lead.acquire()
            self._mine.is_leading = True
            with self._lock:
                self._num_idle -= 1
            job = self._hear_job()
            if job is not None:
                return job

    def _hear_job(self) -> Job | None:
        """Hear as the leader, until there is a job for this thread or it leads no more."""
        while self._mine.is_leading:
            message = None if self._is_ended else self._hear()
            if message is None:
                self._is_ended = True
                self._step_down()
                return None
            job = self._accept(message)
            del message
            if job is None:
                continue
            with self._lock:
                self._num_busy += 1
                if self._mine.is_leading and not self._has_successor():
                    self._backlog.append(job)
                    continue
            if self._mine.is_leading:
                self._step_down()
            return job
        return None

    def _has_successor(self) -> bool:
        """Whether another thread can lead; starts one where the limit lets it. The lock is held."""
        if self._num_idle == 0 and len(self._threads) - self._num_blocked < self._limit:
            self._add_thread()
            return True
        return self._num_idle > 0

    def _step_down(self) -> None:
        self._mine.is_leading = False
        self._lead.release()

    @contextmanager
    def blocking(self) -> Generator[None]:
        """Say that this thread waits for another worker, or for another thread's call, inside."""
        if not self._mine.is_worker:
            yield
            return
        with self._lock:
            self._num_blocked += 1
            if self._backlog or (self._mine.is_leading and self._num_idle == 0):
                self._add_thread()
        if self._mine.is_leading:
            self._step_down()
        try:
            yield
        finally:
            with self._lock:
                self._num_blocked -= 1

    def join(self, timeout_secs: float) -> None:
        """Wait until the threads have ended, all but the caller's own. `hear` must have returned None."""
        deadline = time.monotonic() + timeout_secs
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
