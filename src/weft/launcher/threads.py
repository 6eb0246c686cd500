"""Ranks as threads of this process, each with a torch.distributed world of its own.

A thread can't be killed. When a rank fails, its groups are aborted, which ends the
others wherever they use those groups; one that does not end is left running (it is
a daemon thread) and the error says so and where it is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch

from weft.launcher.report import (
    RankFailure,
    exception_failure,
    launch_error,
    launch_timeout_error,
    stuck_failure,
)
from weft.launcher.stacks import format_thread
from weft.launcher.stores import corner_of, memory_store
from weft.launcher.world import (
    RankWorld,
    abort_groups,
    destroy_groups,
    entered_world,
    init_default_group,
    isolated_worlds,
)
from weft.rank_thread import begin_rank, end_rank

# As for process-ranks: see child.LINGER_SECS.
_LINGER_SECS = 1.0

# What became of a rank that the timeout found running, by whether it still is.
_AFTER_TIMEOUT = {
    True: "had not finished, and runs on, since a thread can't be killed",
    False: "had not finished",
}


def run_threads(
    call: Callable[[], object],
    ranks: int,
    *,
    backend: str,
    timeout_secs: float | None,
    collective_timeout_secs: float,
    grace_secs: float,
) -> list[object]:
    """Run `call` on `ranks` threads and return the results by rank; launch() says how it fails."""
    _keep_device_guard()
    run = ThreadRun(call, ranks, backend, timedelta(seconds=collective_timeout_secs))
    with isolated_worlds():
        return run.run(timeout_secs, grace_secs)


_guard_mutex = threading.Lock()
_guard_keeper: threading.Thread | None = None


def _keep_device_guard() -> None:
    """Make what torch shares between threads outlive the ranks.

    Where torch knows CUDA and finds no GPU, the first fake tensor (DTensor's dispatcher makes some) sets a
    guard for all threads that belongs to its own thread; in torch 2.11 the others crash when that one has
    ended. So it is set on a thread that never ends. A private name: `_ensureCUDADeviceGuardSet`.
    """
    global _guard_keeper
    with _guard_mutex:
        set_guard = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
        if _guard_keeper is not None or set_guard is None or torch.cuda.is_available():
            return
        is_set = threading.Event()

        def keep() -> None:
            try:
                set_guard()
            finally:
                is_set.set()
            threading.Event().wait()

        _guard_keeper = threading.Thread(target=keep, name="weft-guard", daemon=True)
        _guard_keeper.start()
        is_set.wait()


@contextmanager
def _at_home(world: RankWorld) -> Generator[None]:
    """Be one of a rank's threads, inside."""
    # Backward runs in this thread then, on a GPU too, so that hooks find this rank's world.
    with entered_world(world), torch.autograd.set_multithreading_enabled(False):
        yield


class ThreadRun:
    """One call in flight on N threads. `_changed` guards what ranks report, and tells of it."""

    def __init__(self, call: Callable[[], object], num_ranks: int, backend: str, timeout: timedelta) -> None:
        self._call = call
        self._num_ranks = num_ranks
        self._backend = backend
        self._timeout = timeout
        self._store = memory_store()
        self._worlds = [RankWorld() for _ in range(num_ranks)]
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"weft-rank-{rank}", daemon=True)
            for rank in range(num_ranks)
        ]
        self._changed = threading.Condition()
        self._results: dict[int, object] = {}
        self._failures: dict[int, RankFailure] = {}
        # Whoever drops a group last waits for the group's threads, and must be none of them: a callback that
        # they run may hold it. So it is held here until all ranks have ended.
        self._ended_groups: list[object] = []
        self._done: set[int] = set()

    def run(self, timeout_secs: float | None, grace_secs: float) -> list[object]:
        """Start the threads, wait for them and return the results, or raise LaunchError."""
        try:
            for thread in self._threads:
                thread.start()
            self._wait(timeout_secs, lambda: self._all_done() or bool(self._failures))
            if self._failures:
                self._wait(grace_secs, self._all_done)
                self._raise_failures(grace_secs)
            if not self._all_done():
                self._raise_timeout(timeout_secs or 0.0, grace_secs)
        except BaseException as error:
            self._abort(f"the launcher stopped waiting: {type(error).__name__}")
            raise
        for thread in self._threads:
            thread.join()
        return [self._results[rank] for rank in range(self._num_ranks)]

    def _run_rank(self, rank: int) -> None:
        enter = partial(_at_home, self._worlds[rank])
        begin_rank(enter)
        with enter():
            try:
                result = self._run_call(rank)
                with self._changed:
                    self._results[rank] = result
                    self._changed.notify_all()
                    self._changed.wait_for(self._all_ended, _LINGER_SECS)
                end_rank()
                self._ended_groups += self._worlds[rank].pg_map
                destroy_groups()
            except BaseException as exception:
                self._fail(rank, exception)
        with self._changed:
            self._done.add(rank)
            self._changed.notify_all()

    def _run_call(self, rank: int) -> object:
        corner = corner_of(self._store, "launch", self._timeout)
        init_default_group(self._backend, corner, rank, self._num_ranks, self._timeout)
        try:
            return self._call()
        except SystemExit as exit_request:
            if exit_request.code not in (None, 0):
                raise
            return None

    def _fail(self, rank: int, exception: BaseException) -> None:
        failure = exception_failure(rank, exception, time.monotonic())
        abort_groups(failure.headline)
        with self._changed:
            self._failures[rank] = failure
            self._changed.notify_all()
        end_rank(failure.headline)
        with suppress(Exception):  # the groups were aborted; what led to that is what is reported
            destroy_groups()

    def _all_done(self) -> bool:
        return len(self._done) == self._num_ranks

    def _all_ended(self) -> bool:
        return bool(self._failures) or len(self._results) == self._num_ranks

    def _wait(self, within_secs: float | None, is_enough: Callable[[], bool]) -> None:
        # In slices, since a wait without end on a lock can't be interrupted on every platform.
        stop_at = math.inf if within_secs is None else time.monotonic() + within_secs
        with self._changed:
            while not is_enough() and (remaining := stop_at - time.monotonic()) > 0:
                self._changed.wait(min(remaining, 1.0))

    def _abort(self, reason: str) -> None:
        for world in self._worlds:
            abort_groups(reason, world)

    def _raise_failures(self, grace_secs: float) -> None:
        what = f"had not ended {grace_secs:g} seconds after the failure, and a thread can't be killed"
        stuck = [stuck_failure(rank, what, stack) for rank, stack in self._stacks().items()]
        with self._changed:
            failures = [*self._failures.values(), *stuck]
        raise launch_error(failures, self._num_ranks)

    def _raise_timeout(self, timeout_secs: float, grace_secs: float) -> None:
        stacks = self._stacks()
        self._abort(f"the run went past its timeout of {timeout_secs:g} seconds")
        self._wait(grace_secs, self._all_done)
        running = self._stacks().keys()
        stuck = [
            stuck_failure(rank, _AFTER_TIMEOUT[rank in running], stack) for rank, stack in stacks.items()
        ]
        raise launch_timeout_error(stuck, self._num_ranks, timeout_secs)

    def _stacks(self) -> dict[int, str]:
        """Where each rank that has not ended is. Those that only tidy up count where there are no others."""
        with self._changed:
            running = [rank for rank in range(self._num_ranks) if rank not in self._done]
            running = [rank for rank in running if rank not in self._results] or running
        return {rank: format_thread(self._threads[rank].ident or 0) for rank in running}
