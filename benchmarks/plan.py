"""How close is a planned step time to a measured one, once this machine is calibrated?

A transformer like `weft train --model small`, of fewer layers, on two ranks of this machine, one thread a
rank, with Trainer and AdamW, over the local group. First `weft plan --calibrate` measures the machine, then
the plan is made, then the steps are measured. `planned` and `measured` must be within a quarter of each
other, whichever is the longer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness import Candidate, CaseResult, Schedule, Summary, announce, measure
from question import ask
from ranks import run_ranks
from report import Goal
from torch.optim import AdamW

from weft.planning.calibrate import calibrate
from weft.planning.job import Job, with_rows
from weft.planning.machine import Machine
from weft.planning.simulate import simulate
from weft.training.layout import plan_layout
from weft.training.model import ModelSize, make_model, next_byte_loss
from weft.training.strategies import transformer_plan
from weft.training.trainer import Strategy, Trainer

NUM_RANKS = 2
LIMIT = 1.25
BATCH = 8  # of both ranks
SMALL = ModelSize(width=384, depth=3, num_heads=8, hidden=1024, context=128)
TINY = ModelSize(width=96, depth=3, num_heads=8, hidden=256, context=64)


@dataclass(frozen=True)
class Case:
    """A strategy and a size of the model."""

    strategy: str
    words: str
    size: ModelSize

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.words}"


CASES = [
    Case(strategy, words, size)
    for words, size in (("small", SMALL), ("tiny", TINY))
    for strategy in ("ddp", "fsdp", "tp")
]


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case."""
    return [
        Goal(case.name, "planned", "measured", LIMIT),
        Goal(case.name, "measured", "planned", LIMIT),
    ]


def make_job(size: ModelSize) -> Job:
    tokens = torch.zeros(1, size.context, dtype=torch.long)
    return Job(make_model(size, 0), tokens, tokens, next_byte_loss, transformer_plan())


def plan_secs(case: Case, machine: Machine) -> float:
    """The planned time of a step."""
    layout = plan_layout(case.strategy, NUM_RANKS)
    job = partial(make_job, case.size)
    return simulate(job, layout, machine, batch=BATCH // layout.num_shares).time.total_secs


# -- on the ranks ------------------------------------------------------------------


def measure_cases(cases: Sequence[Case], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the cases, one after the other. Every rank calls it."""
    torch.set_num_threads(1)
    results: list[CaseResult] = []
    for case in cases:
        announce(case.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, 5)
        summaries = measure({"measured": make_step(case)}, schedule)
        results.append(CaseResult("a step", case.name, summaries))
    return results


def make_step(case: Case) -> Candidate:
    job = make_job(case.size)
    trainer = Trainer(job.model, job.loss, AdamW, Strategy(case.strategy, tp_plan=transformer_plan()))
    batch = BATCH // trainer.layout.num_shares
    inputs, targets = with_rows(job.inputs, batch), with_rows(job.targets, batch)
    for _ in range(3):
        trainer.step(inputs, targets)
    return lambda: trainer.step(inputs, targets)


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask("plan", __doc__)
    cases = question.choose(CASES)
    machine = calibrate(num_threads=1)
    measured = run_ranks(measure_cases, NUM_RANKS, cases, question.rounds, question.is_quick, mpiexec=None)
    results: list[CaseResult] = []
    for case, result in zip(cases, measured, strict=True):
        secs = plan_secs(case, machine)
        planned = Summary(secs, secs, secs, 1)
        results.append(CaseResult(result.table, result.case, {"planned": planned, **result.summaries}))
    question.answer(results, [goal for case in cases for goal in plan_goals(case)])


if __name__ == "__main__":
    sys.exit(main())
