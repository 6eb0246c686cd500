"""Every goal of every question in one table, from the newest saved answer of each.

An answer is what a question wrote as JSON. Goals without a limit are reported in the answers and left out
here: the table is about what must be reached. Pure, but for `read_newest`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Goal, Kind, format_amount, format_comparison, format_table

COLUMNS = ("case", "compared", "seen", "at most", "")


@dataclass(frozen=True)
class Judged:
    """A goal with a limit, and what became of it."""

    goal: Goal
    limit: float
    seen: float
    is_short: bool

    @property
    def cells(self) -> list[str]:
        kind = self.goal.kind
        return [
            self.goal.case,
            format_comparison(self.goal),
            format_amount(self.seen, kind),
            format_amount(self.limit, kind),
            "SHORT" if self.is_short else "OK",
        ]


@dataclass(frozen=True)
class Answer:
    """What one run of a question found."""

    question: str
    date: str
    machine: str
    goals: Sequence[Judged]
    medians: Mapping[str, Mapping[str, float]]  # in seconds, by case and candidate


@dataclass(frozen=True)
class Skipped:
    """A question that can't be answered on a machine, and why."""

    question: str
    reason: str


def decode_answer(text: str) -> Answer | Skipped:
    """Read what a question wrote."""
    saved: dict[str, Any] = json.loads(text)
    if "skipped" in saved:
        return Skipped(saved["question"], saved["skipped"])
    goals: list[Judged] = []
    for entry in saved["goals"]:
        if entry["limit"] is not None:
            goal = Goal(
                entry["case"], entry["candidate"], entry["against"], entry["limit"], Kind(entry["kind"])
            )
            goals.append(Judged(goal, entry["limit"], entry["seen"], entry["verdict"] == "SHORT"))
    medians = {
        case["case"]: {name: seen["median_secs"] for name, seen in case["summaries"].items()}
        for case in saved["cases"]
    }
    return Answer(saved["question"], saved["date"], describe(saved["machine"]), goals, medians)


def describe(machine: Mapping[str, Any]) -> str:
    """The machine in a line."""
    gpus = machine.get("gpus", [])
    where = f"one {gpus[0]}" if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]}" if gpus else machine["cpu"]
    return f"{where}, {machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}"


def read_newest(folder: Path) -> list[Answer]:
    """The newest answer of each question among the JSON files of a folder, in the order of names."""
    answers = [decode_answer(path.read_text()) for path in folder.glob("*.json")]
    by_date = sorted((a for a in answers if isinstance(a, Answer)), key=lambda answer: answer.date)
    newest = {answer.question: answer for answer in by_date}
    return [newest[question] for question in sorted(newest)]


def format_terminal(answers: Sequence[Answer], remarks: Sequence[str] = ()) -> str:
    """The table as a terminal shows it, remarks, and what falls short."""
    rows = [["question", *COLUMNS]]
    rows += [[answer.question, *goal.cells] for answer in answers for goal in answer.goals]
    parts = [format_table(rows, num_left=3), "\n".join(remarks), "\n".join(conclude(answers))]
    return "\n\n".join(part for part in parts if part)


def format_page(answers: Sequence[Answer], unanswered: Sequence[str]) -> str:
    """The table as a page of Markdown, with the day and the machine of each answer."""
    verdict, *short = conclude(answers)
    ending = ["", "## What falls short", "", *[f"- {line.strip()}" for line in short]] if short else []
    lines = [
        "# Every goal of every benchmark",
        "",
        "Made by `scripts/bench --table` from the newest file of each question in this folder. A goal is a",
        "limit on a ratio (`/`), a difference (`-`) or a number; lower is better, SHORT is above the limit.",
        "",
        verdict.replace(" These fall short:", ""),
    ]
    for answer in answers:
        lines += ["", f"## {answer.question}", "", f"{answer.date}, {answer.machine}.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(goal.cells)} |" for goal in answer.goals]
    for question in unanswered:
        lines += ["", f"## {question}", "", "Never run and saved."]
    return "\n".join(lines + ending) + "\n"


def conclude(answers: Sequence[Answer]) -> list[str]:
    """How many goals are reached, then the ones that aren't, a line each."""
    num_goals = sum(len(answer.goals) for answer in answers)
    short = [(answer, goal) for answer in answers for goal in answer.goals if goal.is_short]
    head = f"{num_goals - len(short)} of {num_goals} goals are reached"
    if not short:
        return [f"{head}."]
    lines = [f"{head}. These fall short:"]
    for answer, goal in short:
        case, compared, seen, limit, _ = goal.cells
        lines.append(f"  {answer.question}, {case}: {compared} {seen}, at most {limit}")
    return lines
