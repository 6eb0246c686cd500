"""How long does a backward over workers take in weft.dist_autograd, against torch.distributed.autograd?

Each library has three processes of this host, two trainers and a worker with tables, with one thread each for
torch's operators and the library's own defaults for everything else. They are started once; then their
blocks of calls take turns. What a call computes is checked before it is timed.

A `matmul` is a context, a product of two matrices on another worker, the backward through it and the
gradients. The `recommender` is a step of examples/recommender.py: its trainers reduce the gradients of their
dense layers with the library's DistributedDataParallel, torch's over gloo, weft's over its own group.

`torch` is torch.distributed's, `weft` is weft's, `weft exact` is weft's with `backward(..., exact=True)`, for
which torch has no counterpart. `local` is the product in the process itself, without any context.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dist_autograd_teams import Block, Library, Mode, Team, Work
from harness import CaseResult, Schedule, Summary, summarise
from question import Question, ask
from report import Goal

LIBRARIES = {
    "torch": Library(
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        {
            "RemoteModule": "torch.distributed.nn.api.remote_module",
            "DistributedDataParallel": "torch.nn.parallel",
            "DistributedOptimizer": "torch.distributed.optim",
        },
        "gloo",
    ),
    "weft": Library(
        "weft.rpc",
        "weft.dist_autograd",
        {"RemoteModule": "weft", "DistributedDataParallel": "weft", "DistributedOptimizer": "weft"},
        "weft",
    ),
}

# By candidate: whose processes, and how.
CANDIDATES = {
    "torch": ("torch", Mode.FAST),
    "weft": ("weft", Mode.FAST),
    "weft exact": ("weft", Mode.EXACT),
    "local": ("weft", Mode.LOCAL),
}


@dataclass(frozen=True)
class Case:
    """What is timed, in which blocks its candidates take turns, and what is asked of weft over torch."""

    name: str
    work: Work
    size: int
    num_calls: int
    rounds_factor: int  # a short call is timed in more rounds
    limit: float
    exact_limit: float | None

    @property
    def candidates(self) -> list[str]:
        return [name for name in CANDIDATES if name != "local" or self.work is Work.MATMUL]


CASES = [
    Case("matmul 64 x 64", Work.MATMUL, 64, 25, 4, 0.5, 0.5),
    Case("matmul 256 x 256", Work.MATMUL, 256, 25, 4, 0.5, 0.5),
    Case("recommender, a step", Work.RECOMMEND, 0, 20, 2, 0.6, None),
]


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case, and what is reported of it."""
    return [
        Goal(case.name, "weft", "torch", case.limit),
        Goal(case.name, "weft exact", "torch", case.exact_limit),
        Goal(case.name, "weft", "local", None),
    ]


def measure_case(case: Case, teams: Mapping[str, Team], schedule: Schedule) -> dict[str, Summary]:
    """Let the candidates take turns at a case."""
    print(f"measuring {case.name}: {', '.join(case.candidates)}", file=sys.stderr, flush=True)
    timed: dict[str, list[float]] = {name: [] for name in case.candidates}
    for _ in range(schedule.num_rounds):
        for name, seconds in timed.items():
            team, mode = CANDIDATES[name]
            seconds += teams[team].time_block(Block(case.work, case.size, mode, schedule.num_calls))
    return {name: summarise(seconds) for name, seconds in timed.items()}


def measure(cases: Sequence[Case], question: Question) -> list[CaseResult]:
    """Start the teams, measure all cases, and end them."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as running:
        teams: dict[str, Team] = {}
        for name, library in LIBRARIES.items():
            teams[name] = Team(name, library, Path(folder, name))
            running.callback(teams[name].close)
        results: list[CaseResult] = []
        for case in cases:
            schedule = question.schedule(case.num_calls, case.rounds_factor)
            results.append(CaseResult("dist_autograd", case.name, measure_case(case, teams, schedule)))
        return results


def main() -> None:
    question = ask("dist_autograd", __doc__)
    cases = question.choose(CASES)
    question.answer(measure(cases, question), [goal for case in cases for goal in plan_goals(case)])


if __name__ == "__main__":
    sys.exit(main())
