"""The benchmarks' harness adds up, judges and prints; a question runs from its command line."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
# A benchmark is a script: its folder is on the path when it runs, and nowhere else.
sys.path.append(str(BENCHMARKS))
import collectives  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
from harness import CaseResult, Schedule, Summary  # noqa: E402
from report import Goal, Kind  # noqa: E402

sys.path.remove(str(BENCHMARKS))

MACHINE = {"cpu": "a fast one", "cores": 2}


def seen(**median_secs: float) -> CaseResult:
    return CaseResult(
        "speeds", "a case", {name: Summary(m, m / 2, m * 2, 5) for name, m in median_secs.items()}
    )


def test_a_summary_is_the_median_and_the_quartiles() -> None:
    assert harness.summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == Summary(3.0, 2.0, 4.0, 5)
    assert harness.summarise([7.0]) == Summary(7.0, 7.0, 7.0, 1)


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "ab"}
    timed = harness.time_in_turns(candidates, Schedule(2, 3), align=lambda: calls.append("|"))
    # In each block one call warms up and three are timed.
    assert "".join(calls) == "|aaaa|bbbb|aaaa|bbbb"
    assert {name: len(secs) for name, secs in timed.items()} == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    ("goal", "amount", "word"),
    [
        (Goal("a case", "weft", "gloo", 0.25), 0.25, "OK"),
        (Goal("a case", "weft", "gloo", 0.2), 0.25, "SHORT"),
        (Goal("a case", "weft", "gloo", None), 0.25, ""),
        (Goal("a case", "gloo", "weft", 2.5, Kind.EXTRA), 3.0, "SHORT"),
        (Goal("a case", "weft", None, 1.0, Kind.TIME), 1.0, "OK"),
    ],
)
def test_a_goal_is_judged(goal: Goal, amount: float, word: str) -> None:
    (verdict,) = report.judge([goal], [seen(gloo=4.0, weft=1.0)])
    assert (verdict.seen, verdict.word) == (amount, word)


def test_goals_of_what_was_not_measured_are_left_out() -> None:
    goals = [
        Goal("a case", "weft", "MPICH", 1.0),
        Goal("a case", "MPICH", None, 1.0, Kind.TIME),
        Goal("other", "weft", "gloo", 1),
    ]
    assert report.judge(goals, [seen(gloo=4.0, weft=1.0)]) == []


def test_tables_are_aligned() -> None:
    results = [seen(gloo=0.25, weft=0.001), CaseResult("speeds", "b", {"weft": Summary(0.00001, 0, 0, 1)})]
    goals = [Goal("a case", "weft", "gloo", 0.2), Goal("a case", "gloo", "weft", 15e-6, Kind.EXTRA)]
    full = report.Report("q", results, report.judge(goals, results), MACHINE, ["A note."])
    assert report.format_report(full).splitlines() == [
        "speeds, median ms   gloo    weft",
        "a case             250.0   1.000",
        "b                      -  0.0100",
        "",
        "goals                       seen  at most",
        "a case  weft / gloo        0.004    0.200     OK",
        "a case  gloo - weft  249000.0 us  15.0 us  SHORT",
        "",
        "A note.",
    ]


def test_a_report_is_saved_as_json(tmp_path: Path) -> None:
    results = [seen(gloo=4.0, weft=1.0)]
    verdicts = report.judge([Goal("a case", "weft", "gloo", 0.2)], results)
    path = report.save_report(report.Report("q", results, verdicts, MACHINE), tmp_path)
    assert path.name == f"q-{datetime.date.today().isoformat()}-2-cores.json"
    saved = json.loads(path.read_text())
    assert saved["machine"] == MACHINE
    assert saved["cases"][0]["summaries"]["weft"] == {
        "median_secs": 1.0,
        "p25_secs": 0.5,
        "p75_secs": 2.0,
        "num_calls": 5,
    }
    assert saved["goals"][0] == {
        "case": "a case",
        "candidate": "weft",
        "against": "gloo",
        "limit": 0.2,
        "kind": "ratio",
        "seen": 0.25,
        "verdict": "SHORT",
    }


def test_a_gpu_names_the_machine() -> None:
    assert report.host_kind({"cores": 16, "gpus": ["NVIDIA H200"]}) == "nvidia-h200"


def test_collectives_run() -> None:
    options = ["--quick", "--no-mpi", "--only", "all-reduce 4 KB"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "collectives.py", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all-reduce 4 KB, 2 ranks" in done.stdout
    assert "weft / gloo" in done.stdout
    assert "measuring all-reduce 4 KB" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--quick", "--save"], "--quick measures nothing worth keeping"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--only", "no such case"], "no case has 'no such case' in its name"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        collectives.main()
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_every_goal_is_of_a_case() -> None:
    goals = [goal for case in collectives.CASES for goal in collectives.plan_goals(case)]
    assert {goal.case for goal in goals} == {case.name for case in collectives.CASES}
