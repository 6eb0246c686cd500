"""One job on a pool of process-ranks, from the launcher's side: send it, watch the ranks, collect.

Ends in one of three ways: every rank returned; a rank failed, and the others got
a grace to end by themselves; the timeout passed. Ranks that are still running
after the last two are killed by the pool, once their stacks are in the error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from weft.errors import InternalError
from weft.launcher.payload import decode_exception, decode_result
from weft.launcher.process import LOOK_SECS, RankProcess, fetch_stacks, wait_for_messages
from weft.launcher.report import RankFailure, describe_exit, launch_error, launch_timeout_error, stuck_failure
from weft.launcher.wire import Failed, Finish, Idle, Job, Message, Returned

# How long a rank whose stream has ended may take to be gone.
_EXIT_SECS = 5.0


class JobRun:
    """A job in flight on all ranks of a pool."""

    def __init__(self, processes: Sequence[RankProcess], grace_secs: float) -> None:
        self._processes = processes
        self._grace_secs = grace_secs
        self._returned: dict[int, bytes] = {}
        self._failures: dict[int, RankFailure] = {}
        self._idle: set[int] = set()
        self._dead: set[int] = set()
        self._is_finish_sent = False

    @property
    def all_idle(self) -> bool:
        """Whether every rank came back, so that the pool can take another job."""
        return len(self._idle) == len(self._processes)

    def run(self, job: Job, timeout_secs: float | None) -> list[object]:
        """Run the job and return the results by rank, or raise LaunchError."""
        stop_at = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        for process in self._processes:
            self._send(process, job, stop_at)
        is_failing = False
        while len(self._idle | self._dead) < len(self._processes):
            now = time.monotonic()
            if self._failures and not is_failing:
                # From now on the grace counts and the timeout does not: the user must see the failure.
                is_failing, stop_at = True, now + self._grace_secs
            if now >= stop_at:
                break
            self._handle_messages(min(stop_at - now, LOOK_SECS))
            self._send_finish()
        self._raise_failures(timeout_secs)
        return [decode_result(self._returned[process.rank]) for process in self._processes]

    def _send(self, process: RankProcess, job: Job, stop_at: float) -> None:
        within_secs = None if stop_at == math.inf else max(0.001, stop_at - time.monotonic())
        # A rank that reads nothing until the timeout is simply unfinished then.
        if not process.send(job, within_secs) and time.monotonic() < stop_at:
            self._note_death(process)

    def _handle_messages(self, within_secs: float) -> None:
        for process in wait_for_messages(self._processes_alive(), within_secs):
            # Looked at first: what a rank has said before it died counts.
            has_exited = process.exit_code() is not None
            for message in process.receive():
                self._handle(process.rank, message)
            if process.is_closed or has_exited:
                self._note_death(process)

    def _handle(self, rank: int, message: Message) -> None:
        match message:
            case Returned(result):
                self._returned[rank] = result
            case Failed():
                self._failures[rank] = RankFailure(
                    rank=rank,
                    headline=message.headline,
                    report=message.report,
                    at_secs=message.at_secs,
                    exception=decode_exception(message.exception, message.headline.removeprefix("raised ")),
                    is_consequence=message.is_consequence,
                )
            case Idle():
                self._idle.add(rank)
            case _:
                raise InternalError(f"launch: rank {rank} sent {message!r} during a job")

    def _send_finish(self) -> None:
        """Let returned ranks drop their groups, once nobody needs them any more."""
        ended = self._returned.keys() | self._failures.keys()
        if not self._is_finish_sent and (self._failures or len(ended) == len(self._processes)):
            self._is_finish_sent = True
            for process in self._processes_alive():
                process.send(Finish(), LOOK_SECS)

    def _processes_alive(self) -> list[RankProcess]:
        return [process for process in self._processes if process.rank not in self._dead]

    def _note_death(self, process: RankProcess) -> None:
        self._dead.add(process.rank)
        returncode = process.wait_exit(_EXIT_SECS)
        how = "closed its connection and lives on" if returncode is None else describe_exit(returncode)
        when = " after its function had returned" if process.rank in self._returned else ""
        stack = process.take_stacks()
        headline = f"died{when}: {how}"
        report = f"{headline}; last seen at:\n{stack}" if stack else headline
        death = RankFailure(process.rank, headline, report, time.monotonic())
        self._failures.setdefault(process.rank, death)

    def _raise_failures(self, timeout_secs: float | None) -> None:
        unfinished = [process for process in self._processes_alive() if process.rank not in self._idle]
        if not self._failures and not unfinished:
            return
        # Ranks whose function has returned come into it only where nothing else is amiss.
        running = [p for p in unfinished if p.rank not in self._returned] or unfinished
        if not self._failures:
            raise launch_timeout_error(
                _describe_stuck(running, "had not finished"), len(self._processes), timeout_secs or 0.0
            )
        what = f"had not ended {self._grace_secs:g} seconds after the failure and had to be killed"
        stuck = _describe_stuck([process for process in running if process.rank not in self._failures], what)
        raise launch_error([*self._failures.values(), *stuck], len(self._processes))


def _describe_stuck(processes: Sequence[RankProcess], what: str) -> list[RankFailure]:
    return [stuck_failure(rank, what, stack) for rank, stack in fetch_stacks(processes).items()]
