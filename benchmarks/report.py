"""Judge results against goals, print them as tables, and save them as JSON.

Pure, but for `describe_machine`, which looks at this one, and `save_report`.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from harness import CaseResult, Counted, Result

RESULTS = Path(__file__).parent / "results"


class Kind(Enum):
    """What a goal limits."""

    RATIO = "ratio"  # the candidate's median over the baseline's
    EXTRA = "extra"  # the candidate's median less the baseline's, in seconds
    TIME = "time"  # the candidate's median, in seconds
    NUMBER = "number"  # what was counted for the candidate


@dataclass(frozen=True)
class Goal:
    """What a candidate must reach in a case. Without a limit it is only reported."""

    case: str
    candidate: str
    against: str | None
    limit: float | None
    kind: Kind = Kind.RATIO


@dataclass(frozen=True)
class Verdict:
    """A goal, what was seen, and what that means: OK, SHORT, or nothing where there was no limit."""

    goal: Goal
    seen: float
    word: str


@dataclass(frozen=True)
class Report:
    """Everything there is to say about one run."""

    name: str
    results: Sequence[Result]
    verdicts: Sequence[Verdict]
    machine: dict[str, Any]
    notes: Sequence[str] = ()


def judge(goals: Sequence[Goal], results: Sequence[Result]) -> list[Verdict]:
    """Hold the results against the goals. Goals whose case or candidates weren't measured are left out."""
    by_case = {result.case: result.amounts for result in results}
    verdicts: list[Verdict] = []
    for goal in goals:
        amounts = by_case.get(goal.case, {})
        if goal.candidate not in amounts or (goal.against is not None and goal.against not in amounts):
            continue
        seen = _seen(goal, amounts)
        word = "" if goal.limit is None else "OK" if seen <= goal.limit else "SHORT"
        verdicts.append(Verdict(goal, seen, word))
    return verdicts


def _seen(goal: Goal, amounts: dict[str, float]) -> float:
    amount = amounts[goal.candidate]
    if goal.against is None:
        return amount
    return amount - amounts[goal.against] if goal.kind is Kind.EXTRA else amount / amounts[goal.against]


def format_report(report: Report) -> str:
    """The tables that a person reads: medians by case and candidate, then the goals."""
    tables = dict.fromkeys(result.table for result in report.results)
    parts = [format_medians(table, [r for r in report.results if r.table == table]) for table in tables]
    if report.verdicts:
        parts.append(format_verdicts(report.verdicts))
    parts += report.notes
    return "\n\n".join(parts)


def format_medians(table: str, results: Sequence[Result]) -> str:
    """A row a case, a column a candidate. A candidate that a case doesn't have leaves a dash."""
    names = list(dict.fromkeys(name for result in results for name in result.amounts))
    is_timed = isinstance(results[0], CaseResult)
    rows = [[f"{table}, median ms" if is_timed else table, *names]]
    for result in results:
        cells = [result.amounts.get(name) for name in names]
        shown = format_ms if is_timed else format_count
        rows.append([result.case, *("-" if cell is None else shown(cell) for cell in cells)])
    return format_table(rows)


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """A row a goal: what was compared, what was seen, what it had to be."""
    rows = [["goals", "", "seen", "at most", ""]]
    for verdict in verdicts:
        goal = verdict.goal
        rows.append(
            [
                goal.case,
                format_comparison(goal),
                format_amount(verdict.seen, goal.kind),
                "report" if goal.limit is None else format_amount(goal.limit, goal.kind),
                verdict.word,
            ]
        )
    return format_table(rows, num_left=2)


def format_comparison(goal: Goal) -> str:
    """What is held against what."""
    if goal.against is None:
        return goal.candidate
    return f"{goal.candidate} {'-' if goal.kind is Kind.EXTRA else '/'} {goal.against}"


def format_table(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Align the columns: the first `num_left` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_ms(secs: float) -> str:
    """Milliseconds with three digits that mean something, and never fewer than microseconds."""
    ms = secs * 1e3
    return (
        f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}" if ms >= 0.1 else f"{ms:.4f}"
    )


def format_count(amount: float) -> str:
    """A count in whole numbers, or in three digits where it is small."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def format_amount(amount: float, kind: Kind) -> str:
    """What a goal is about, in its unit."""
    match kind:
        case Kind.RATIO:
            return f"{amount:.3f}"
        case Kind.EXTRA:
            return f"{amount * 1e6:.1f} us"
        case Kind.TIME:
            return f"{format_ms(amount)} ms"
        case Kind.NUMBER:
            return format_count(amount)


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if importlib.util.find_spec("mpi4py") is not None:
        machine["mpi"] = {name: version for name in ("mpi4py", "mpich") if (version := _version(name))}
    if torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return machine


def host_kind(machine: dict[str, Any]) -> str:
    """The machine in a word or two, for a file's name. Never its host name, which says nothing to others."""
    words = machine["gpus"][0] if machine.get("gpus") else f"{machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def encode_report(report: Report) -> str:
    """The report of today as JSON."""
    timed = [result for result in report.results if isinstance(result, CaseResult)]
    counted = [result for result in report.results if isinstance(result, Counted)]
    return json.dumps(
        {
            "question": report.name,
            "date": datetime.date.today().isoformat(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "machine": report.machine,
            "notes": list(report.notes),
            "cases": [dataclasses.asdict(result) for result in timed],
            "counted": [dataclasses.asdict(result) for result in counted],
            "goals": [
                dataclasses.asdict(verdict.goal)
                | {"kind": verdict.goal.kind.value, "seen": verdict.seen, "verdict": verdict.word}
                for verdict in report.verdicts
            ],
        },
        indent=1,
    )


def save_report(report: Report, folder: Path = RESULTS) -> Path:
    """Write the report's JSON and return where. A second run of a day replaces the first."""
    today = datetime.date.today().isoformat()
    path = folder / f"{report.name}-{today}-{host_kind(report.machine)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(encode_report(report) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
