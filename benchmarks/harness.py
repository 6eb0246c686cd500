"""Measure candidates against each other, in one run.

A question has cases (rows) and candidates (columns). All candidates of a case take
turns, round after round, in the same processes: what disturbs the machine for a
while disturbs all of them. In each round a candidate makes one call that isn't
timed and then a block of timed ones, back to back. A call took as long as it did on
the slowest rank; what is reported is the median over all timed calls.

A candidate is a function without arguments. Its buffers are made before and are the
same in every call. Judging and printing the results is report.py's work, starting
the ranks that of ranks.py, the command line that of question.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Candidate = Callable[[], object]


@dataclass(frozen=True)
class Schedule:
    """How often a case's candidates run: `num_rounds` blocks of `num_calls` timed calls each."""

    num_rounds: int
    num_calls: int


@dataclass(frozen=True)
class Summary:
    """A candidate's timed calls, in short."""

    median_secs: float
    p25_secs: float
    p75_secs: float
    num_calls: int


@dataclass(frozen=True)
class CaseResult:
    """What was seen in one case, by candidate. Cases of one `table` are printed together."""

    table: str
    case: str
    summaries: dict[str, Summary]

    @property
    def amounts(self) -> dict[str, float]:
        """The median seconds, by candidate."""
        return {name: summary.median_secs for name, summary in self.summaries.items()}


@dataclass(frozen=True)
class Counted:
    """What was counted and not timed in one case, by candidate. `table` names the unit."""

    table: str
    case: str
    amounts: dict[str, float]


Result = CaseResult | Counted


def announce(case: str) -> None:
    """Say on rank 0 what is measured next. To stderr: stdout is for the results."""
    if dist.get_rank() == 0:
        print(f"measuring {case}", file=sys.stderr, flush=True)


def measure(candidates: Mapping[str, Candidate], schedule: Schedule) -> dict[str, Summary]:
    """Time the candidates in turns and return the same summaries on every rank.

    Every rank of the world calls it, with the same candidates in the same order.
    """
    timed = time_in_turns(candidates, schedule, align=dist.barrier)
    calls = torch.tensor(list(timed.values()), dtype=torch.float64)
    dist.all_reduce(calls, dist.ReduceOp.MAX)
    return {name: summarise(row) for name, row in zip(timed, calls.tolist(), strict=True)}


def time_in_turns(
    candidates: Mapping[str, Candidate], schedule: Schedule, align: Callable[[], object]
) -> dict[str, list[float]]:
    """Time the candidates on this rank: the seconds of every timed call, by candidate.

    `align` brings the ranks together before a block. It isn't called before each
    timed call: ranks leave a barrier tens of microseconds apart, which is longer
    than a small collective takes. Within a block the collectives themselves keep
    the ranks together.
    """
    timed: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(schedule.num_rounds):
        for name, call in candidates.items():
            align()
            call()
            for _ in range(schedule.num_calls):
                start_secs = time.perf_counter()
                call()
                timed[name].append(time.perf_counter() - start_secs)
    return timed


def summarise(calls_secs: Sequence[float]) -> Summary:
    """Give the median and the quartiles of at least one timed call. Pure."""
    if len(calls_secs) == 1:
        return Summary(calls_secs[0], calls_secs[0], calls_secs[0], 1)
    p25, median, p75 = statistics.quantiles(calls_secs, n=4, method="inclusive")
    return Summary(median, p25, p75, len(calls_secs))
