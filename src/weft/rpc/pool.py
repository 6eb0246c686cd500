"""The threads that hear messages and run what they ask for.

A message wakes one thread, which takes it and does itself what it asks for: no hand-over on the way. While
that thread is awake nobody else is woken: it looks for more when it is done, so that a flood of small calls
is worked off by one thread instead of many that fight for the interpreter. A job that takes longer than a
moment is noticed by the clock (`look_after`), which wakes the next thread.

The last thread that is not busy runs nothing: it puts jobs on a backlog and keeps hearing, so that answers
are heard whatever the handlers do. A handler that waits for a call of its own says so (`blocking`) and does
not count against the limit, so nested calls never run out of threads. A caller that waits for an answer takes
messages itself (`wait_for`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from weft.rpc.bell import Bell
from weft.rpc.calls import Waiter
from weft.rpc.looking import Lookout

logger = logging.getLogger(__name__)
Job = Callable[[], None]
_NAP_SECS = 0.25  # at most this long without a look, should a wake-up ever be missed
_MOMENT_SECS = 0.001  # a job that takes longer is not waited for
# How often to look for such jobs: each look takes the interpreter from whoever works.
_LOOK_SECS, _SELDOM_SECS = 0.002, 0.005  # when one runs, and when none did
_FEW = 4  # messages that a caller takes for others when its own answer is there
_QUIET_SECS = 0.05  # so long after the last job nobody needs to be looked after


class Ear(Protocol):
    """Where messages come in."""

    is_closing: bool
    bell: Bell

    def has_mail(self) -> bool:
        """Whether there is a message to take."""
        ...

    def take(self) -> Any | None:
        """The next message, if there is one. One thread at a time."""
        ...


class _Running:
    """A job that runs."""

    __slots__ = ("began_at", "is_away")

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.is_away = False  # its thread won't look for messages soon: it is not counted as awake


class _Mine(threading.local):
    is_worker = False
    running: _Running | None = None


class Pool:
    """Threads that run `accept` on each message that the ear takes, and the job that it returns.

    `accept` must not wait; it is called in the order of the messages. Each thread works inside of `enter`.
    `begin` is called when jobs begin to run after a pause: from then on `look_after` must be called until it
    returns None. `accept` may not raise.
    """

    def __init__(
        self,
        ear: Ear,
        accept: Callable[[Any], Job | None],
        enter: Callable[[], AbstractContextManager[None]],
        begin: Callable[[], None],
        limit: int,
    ) -> None:
        self._ear = ear
        self._accept = accept
        self._enter = enter
        self._begin = begin
        self._limit = limit
        self._lookout = Lookout(gives_way=True)  # of the pool's threads
        self._looking = threading.Lock()
        self._caller_lookout = Lookout()  # of the caller that listens
        self._taking = threading.Lock()
        self._listening = threading.Lock()  # of the caller that listens
        self._lock = threading.Lock()  # of all that follows
        self._backlog: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._leaving: list[threading.Thread] = []  # those that are not needed any more, and may still run
        self._num_free = 0  # threads that run no job
        self._num_awake = 0  # threads that will look for messages by themselves
        self._num_blocked = 0
        self._num_busy = 0
        self._running: set[_Running] = set()
        self._is_looked_after = False
        self._num_begun = 0
        self._last_look = (0.0, 0)  # when there was work, and how many jobs had begun
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
        self._set_awake(1)
        thread.start()

    def _set_awake(self, change: int) -> None:
        self._num_awake += change
        self._ear.bell.set_awake(self._num_awake)

    # The threads

    def _run(self) -> None:
        self._mine.is_worker = True
        with self._enter():
            self._run_jobs()

    def _run_jobs(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                return
            running = self._mine.running = _Running()
            with self._lock:
                self._running.add(running)
                self._num_begun += 1
                is_first = not self._is_looked_after
                self._is_looked_after = True
            if is_first:
                self._begin()
            try:
                job()
            except BaseException:
                logger.exception("weft.rpc: a job failed; nobody was told")
            del job  # what it holds must not live until the next one comes
            self._mine.running = None
            with self._lock:
                self._running.discard(running)
                if running.is_away:
                    self._set_awake(1)
                self._num_busy -= 1
                self._num_free += 1

    def _next_job(self) -> Job | None:
        """The next job for this thread; None when it is not needed any more. Sleeps until there is one."""
        ear = self._ear
        while True:
            signal = ear.bell.signal()
            job = self._take_job()
            if job is not None:
                return job
            if self._look():
                continue
            with self._lock:
                if self._backlog and self._may_work():
                    self._num_free -= 1
                    return self._backlog.popleft()
                self._set_awake(-1)
                # The last one that is free stays: those that work may all come to wait.
                is_surplus = self._num_free > 1 and len(self._threads) - self._num_blocked > self._limit + 1
                if ear.is_closing or is_surplus:
                    self._threads.discard(threading.current_thread())
                    self._leaving = [other for other in self._leaving if other.is_alive()]
                    self._leaving.append(threading.current_thread())
                    self._num_free -= 1
                    break
            if not ear.has_mail():  # what came since the last look found this thread awake
                ear.bell.sleep(signal, _NAP_SECS)
                self._lookout.note_woken()
            with self._lock:
                self._set_awake(1)
        ear.bell.wake()  # the next one is to end too, or to hear in this one's place
        return None

    def look_before_sleep(self, *, is_on: bool, has_cores: bool) -> None:
        """Say whether threads may look for messages before they sleep, and whether each has a core for it."""
        for lookout in (self._lookout, self._caller_lookout):
            lookout.allow(is_on=is_on, has_cores=has_cores)

    def _look(self) -> bool:
        """Look for messages before going to sleep, one thread at a time; whether one came."""
        if not self._lookout.is_on or not self._looking.acquire(blocking=False):
            return False
        try:
            return self._lookout.look(self._ear.has_mail, self._need_not_look)
        finally:
            self._looking.release()

    def _need_not_look(self) -> bool:
        # A caller that listens looks itself.
        return bool(self._backlog) or self._ear.is_closing or self._listening.locked()

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
                    self._backlog.append(job)  # behind those that wait already
                    job = self._backlog.popleft() if self._may_work() else None
                    if job is not None:
                        self._num_free -= 1
                        break
        return job

    def _may_work(self) -> bool:
        """Whether this thread may do a job: another one must be free to hear. The lock is held."""
        if self._num_free <= 1 and len(self._threads) - self._num_blocked <= self._limit:
            self._add_thread()
        num_active = len(self._threads) - self._num_free - self._num_blocked
        return self._num_free > 1 and num_active < self._limit

    def look_after(self) -> float | None:
        """See to jobs that take their time: their threads don't count as awake any more.

        Returns when to look again; None when no job runs that has not been seen to, and none did of late.
        """
        now = time.monotonic()
        with self._lock:
            for running in self._running:
                if not running.is_away and now - running.began_at >= _MOMENT_SECS:
                    running.is_away = True
                    self._set_awake(-1)
            is_watched = any(not running.is_away for running in self._running)
            if is_watched or self._last_look[1] != self._num_begun:
                self._last_look = (now, self._num_begun)
            is_waiting = not self._num_awake and (bool(self._backlog) or self._ear.has_mail())
            if now - self._last_look[0] > _QUIET_SECS:
                self._is_looked_after = False
        if is_waiting:
            self._ear.bell.wake()
        if not self._is_looked_after:
            return None
        return now + (_LOOK_SECS if is_watched else _SELDOM_SECS)

    # Those who wait

    @contextmanager
    def blocking(self) -> Generator[None]:
        """Say that this thread waits for another worker, or for another thread's call, inside."""
        running = self._mine.running
        if running is None:
            yield
            return
        with self._lock:
            self._num_blocked += 1
            was_away, running.is_away = running.is_away, True
            if not was_away:
                self._set_awake(-1)
            if self._backlog:
                self._add_thread()
        if self._ear.has_mail():
            self._ear.bell.wake()
        try:
            yield
        finally:
            with self._lock:
                self._num_blocked -= 1
                if not was_away:
                    running.is_away = False
                    self._set_awake(1)

    def wait_for(self, call: Waiter, send: Callable[[], object] | None = None) -> bool:
        """Wait for an answer; whether it came in time. One caller at a time takes messages.

        `send` sends the call, where that is still to be done, and must not wait. It is called when the caller
        listens, so that the answer wakes nobody else.
        """
        if not self._listening.acquire(blocking=False):
            if send is not None:
                send()
            with self.blocking():
                return call.wait()
        bell = self._ear.bell
        call.when_answered = bell.wake_caller
        is_asleep = not self._caller_lookout.is_on  # else it looks by itself for a moment
        bell.set_listening(is_asleep=is_asleep)
        try:
            if send is not None:
                send()
            if self._mine.is_worker:
                with self.blocking():
                    return self._listen(call, is_asleep)
            return self._listen(call, is_asleep)
        finally:
            bell.stop_listening()
            self._listening.release()
            if self._ear.has_mail() and not self._num_awake:  # its sender thought that somebody listens
                self._take_rest()

    def _listen(self, call: Waiter, is_asleep: bool) -> bool:
        bell = self._ear.bell
        while True:
            signal = bell.caller_signal()
            self._take_for_others(call)
            if call.reply is not None:
                return True
            left_secs = call.left_secs()
            if left_secs <= 0 or self._ear.is_closing:
                return call.wait()
            if not is_asleep and self._caller_lookout.look(
                self._ear.has_mail, lambda: call.reply is not None
            ):
                continue
            if not is_asleep:
                is_asleep = True
                bell.set_listening(is_asleep=True)
                continue
            bell.sleep_as_caller(signal, min(left_secs, _NAP_SECS))
            self._caller_lookout.note_woken()

    def _take_for_others(self, call: Waiter) -> None:
        """Take messages until the answer has come; leave the jobs to the pool."""
        while call.reply is None:
            with self._taking:
                message = self._ear.take()
                if message is None:
                    return
                job = self._accept(message)
                del message
            if job is not None:
                self.submit(job)
                if call.left_secs() <= 0:
                    return

    def _take_rest(self) -> None:
        """Take what came while somebody listened: most of it asks for nothing, and nobody need be woken."""
        for _ in range(_FEW):
            with self._taking:
                message = self._ear.take()
                if message is None:
                    return
                job = self._accept(message)
                del message
            if job is not None:
                self.submit(job)
                break
        if self._ear.has_mail() and not self._num_awake:
            self._ear.bell.wake()

    def submit(self, job: Job) -> None:
        """Have a job done on the pool."""
        with self._lock:
            self._num_busy += 1
            self._backlog.append(job)
            is_anyone_awake = self._num_awake > 0
        if not is_anyone_awake:
            self._ear.bell.wake()

    @property
    def is_worker(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return self._mine.is_worker

    def finish_backlog(self) -> None:
        """Do on this thread what the pool left undone when it ended: somebody may wait for it."""
        while self._backlog:
            try:
                self._backlog.popleft()()
            except Exception:
                logger.debug("weft.rpc: a job failed after the end", exc_info=True)

    def join(self, timeout_secs: float) -> None:
        """Wait until the threads have ended, all but the caller's own. The ear must be closing."""
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            threads = [*self._threads, *self._leaving]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
