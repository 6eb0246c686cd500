"""The command line of a question: what is asked of it, and what becomes of its answer.

A question's `main` is

    question = ask("clip_grad_norm", __doc__)
    cases = question.choose(CASES)
    question.answer(run_ranks(...), [goal for case in cases for goal in plan_goals(case)])

so that every question takes the same options and says in the same way why it measures nothing. What it is
that a question measures is its own file's matter, printing and saving that of report.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from harness import Result, Schedule
from report import Goal, Report, describe_machine, encode_report, format_report, judge, save_report


class Named(Protocol):
    """What `--only` chooses by."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class Question:
    """A question that was asked, with the options it was asked with."""

    name: str
    parser: argparse.ArgumentParser
    options: argparse.Namespace

    @property
    def rounds(self) -> int:
        return self.options.rounds

    @property
    def is_quick(self) -> bool:
        return self.options.quick

    def schedule(self, num_calls: int, rounds_factor: int = 1) -> Schedule:
        """How often candidates take turns; a short call is timed in more rounds."""
        return Schedule(1, 2) if self.is_quick else Schedule(self.rounds * rounds_factor, num_calls)

    def wants(self, name: str) -> bool:
        """Whether `--only` means this case."""
        return self.options.only in name

    def choose(self, cases: Sequence[N]) -> list[N]:
        """The cases that `--only` means; ends the command where it means none."""
        self.check_names([case.name for case in cases])
        return [case for case in cases if self.wants(case.name)]

    def check_names(self, names: Sequence[str]) -> None:
        """End the command where `--only` means none of these cases."""
        if not any(map(self.wants, names)):
            self.parser.error(f"no case has {self.options.only!r} in its name; there are: {', '.join(names)}")

    def skip(self, reason: str) -> NoReturn:
        """End the command, with success: nothing can be measured here, for a reason."""
        if self.options.json is not None:
            self.options.json.write_text(json.dumps({"question": self.name, "skipped": reason}))
        self.parser.exit(0, f"{self.name}: skipped, since {reason}.\n")

    def answer(self, results: Sequence[Result], goals: Sequence[Goal], notes: Sequence[str] = ()) -> None:
        """Judge what was seen, print it, and save it where the options say so."""
        notes = list(notes)
        if self.is_quick:
            notes.append("--quick shows that it runs. These numbers mean nothing.")
        report = Report(self.name, results, judge(goals, results), describe_machine(), notes)
        print(format_report(report))
        if self.options.json is not None:
            self.options.json.write_text(encode_report(report))
        if self.options.save:
            print(f"\nsaved to {save_report(report)}")


def ask(
    name: str,
    doc: str | None,
    add_options: Callable[[argparse.ArgumentParser], Any] | None = None,
    *,
    needs_gpu: bool = False,
) -> Question:
    """Read the command line of a question, whose first line of `doc` is the question itself.

    Ends the command, with the reason, when options don't go together, or when it needs
    a GPU and there is none.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="few calls on small tensors: does it run at all?"
    )
    parser.add_argument("--save", action="store_true", help="write the results to benchmarks/results")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to a file of your own")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases with TEXT in their name")
    parser.add_argument("--rounds", metavar="N", type=int, default=10, help="how often candidates take turns")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    if options.quick and options.save:
        parser.error("--quick measures nothing worth keeping: leave out one of --quick and --save")
    question = Question(name, parser, options)
    if needs_gpu and not torch.cuda.is_available():
        question.skip("torch sees no CUDA device here")
    return question
