"""A pool of process-ranks: started once, then one job after another.

Starting a rank means importing torch, seconds of work; a job on a running pool
takes milliseconds. A pool that lost a rank, or had to kill one, is closed for good:
its owner makes another.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from weft.errors import ConfigError, LaunchError, StateError
from weft.launcher.backends import announce_engine, resolve_local_engine
from weft.launcher.job import JobRun
from weft.launcher.options import check_function, check_ranks, check_timeouts
from weft.launcher.payload import encode_call
from weft.launcher.process import LOOK_SECS, RankProcess, wait_for_messages
from weft.launcher.report import RankFailure, describe_exit, launch_error
from weft.launcher.stores import Store, free_port, host_store, loopback_host
from weft.launcher.wire import Job, Meet, Ready
from weft.trust import given_secret, make_secret

_START_SECS = 180.0
_EXIT_SECS = 5.0


class RankPool:
    """N processes that wait for functions to run as ranks 0 to N-1.

    Use it as a context manager, or `close` it. Jobs run one at a time; threads that
    call `run` together wait for each other.
    """

    def __init__(self, ranks: int, *, grace: float = 5.0) -> None:
        """Start the ranks and wait until all are ready. `grace` is in seconds: see launch()."""
        check_ranks(ranks, "RankPool")
        check_timeouts("RankPool", grace=grace)
        if not sys.executable:
            raise ConfigError(
                "RankPool: sys.executable is empty, so no process-rank can be started. Use kind='thread'."
            )
        self._lock = threading.Lock()
        self._grace_secs = grace
        self._num_jobs = 0
        self._store: Store | None = None
        self._processes: list[RankProcess] = []
        given = given_secret()
        secret = given or make_secret()
        try:
            for rank in range(ranks):
                self._processes.append(RankProcess(rank, ranks, rank_environment(rank, ranks)))
            # The launcher hosts the store, so that it outlives every rank.
            self._store, port = host_store()
            for process in self._processes:
                process.send(Meet(port, secret.reveal(), given is not None), _START_SECS)
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        self._num_ranks = ranks

    @property
    def ranks(self) -> int:
        """How many ranks it has, or had."""
        return self._num_ranks

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids; empty once closed."""
        return [process.pid for process in self._processes]

    @property
    def is_usable(self) -> bool:
        """Whether the pool can take a job: it is open, and every rank lives."""
        return bool(self._processes) and all(process.exit_code() is None for process in self._processes)

    def run(
        self,
        fn: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        collective_timeout: float = 300.0,
        by_value: bool = False,
    ) -> list[Any]:
        """Run `fn` on every rank and return the results by rank; see launch() for the arguments and errors.

        `by_value` sends the function's whole module by value: see encode_call. After a LaunchError
        the pool goes on if every rank came back by itself, else it is closed (`is_usable` tells).
        """
        check_function(fn, "RankPool.run")
        return self.run_encoded(
            encode_call(fn, args, kwargs or {}, by_value=by_value),
            backend=backend,
            timeout=timeout,
            collective_timeout=collective_timeout,
        )

    def run_encoded(
        self, call: bytes, *, backend: str | None, timeout: float | None, collective_timeout: float
    ) -> list[Any]:
        """Run a call that payload.encode_call has pickled; else as `run`."""
        choice = resolve_local_engine(backend, self._num_ranks, "RankPool.run")
        check_timeouts("RankPool.run", collective_timeout=collective_timeout)
        if timeout is not None:
            check_timeouts("RankPool.run", timeout=timeout)
        with self._lock:
            if not self.is_usable:
                raise StateError(
                    "RankPool.run: the pool is closed, or one of its ranks has died. Start another one."
                )
            announce_engine(self._num_ranks, choice)
            self._num_jobs += 1
            job = Job(
                call=call,
                backend=choice.backend,
                collective_timeout_secs=collective_timeout,
                store_corner=f"job {self._num_jobs}",
                master_port=free_port(),
                sys_path=tuple(map(str, sys.path)),
                argv=tuple(sys.argv),
                working_dir=os.getcwd(),
            )
            job_run = JobRun(self._processes, self._grace_secs)
            try:
                return job_run.run(job, timeout)
            finally:
                # Also after KeyboardInterrupt: ranks that are still at work have no one to report to.
                if not job_run.all_idle:
                    self.kill()

    def close(self) -> None:
        """Let the ranks exit in an orderly way, and kill those that do not."""
        with self._lock:
            for process in self._processes:
                process.hang_up()
            stop_at = time.monotonic() + _EXIT_SECS
            for process in self._processes:
                process.wait_exit(max(0.0, stop_at - time.monotonic()))
            self.kill()

    def kill(self) -> None:
        """Kill the ranks, whatever they are doing."""
        self._store = None
        processes, self._processes = self._processes, []
        for process in processes:
            process.signal_kill()
        for process in processes:
            process.kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    def _wait_ready(self) -> None:
        waiting = {process.rank: process for process in self._processes}
        stop_at = time.monotonic() + _START_SECS
        while waiting:
            for process in wait_for_messages(list(waiting.values()), LOOK_SECS):
                if any(isinstance(message, Ready) for message in process.receive()):
                    del waiting[process.rank]
            lost = [p for p in waiting.values() if p.is_closed or p.exit_code() is not None]
            if lost or time.monotonic() > stop_at:
                raise self._start_error(lost or list(waiting.values()))

    def _start_error(self, processes: Sequence[RankProcess]) -> LaunchError:
        failures: list[RankFailure] = []
        for process in processes:
            returncode = process.wait_exit(LOOK_SECS)
            how = (
                f"was not ready after {_START_SECS:g} seconds"
                if returncode is None
                else describe_exit(returncode)
            )
            report = f"could not start: {how}. What it wrote to stderr says why.\n{process.take_stacks()}"
            failures.append(RankFailure(process.rank, f"could not start: {how}", report, time.monotonic()))
        return launch_error(failures, len(self._processes))


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """The environment of a process-rank: this process's, and torchrun's variables. It has no secret."""
    env = dict(os.environ)
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=loopback_host(),  # MASTER_PORT comes with each job
    )
    # Under torchrun this says that its agent hosts the store; for our MASTER_PORT nobody does.
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // ranks)))
    return env
