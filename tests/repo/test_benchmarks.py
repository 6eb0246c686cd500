"""The benchmarks' harness adds up, judges and prints; a question runs from its command line."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.commands import why_broken
from tests.repo.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
# A benchmark is a script: its folder is on the path when it runs, and nowhere else.
sys.path.append(str(BENCHMARKS))
import collectives  # noqa: E402
import command  # noqa: E402
import harness  # noqa: E402
import headlines  # noqa: E402
import report  # noqa: E402
import summary  # noqa: E402
from harness import CaseResult, Counted, Schedule, Summary  # noqa: E402
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


def test_what_is_counted_is_judged_and_shown() -> None:
    counted = Counted("peak, MB", "a case, memory", {"weft": 150.0, "torch": 100.0, "off": 0.000012})
    goals = [
        Goal("a case, memory", "weft", "torch", 1.0),
        Goal("a case, memory", "off", None, 1e-4, Kind.NUMBER),
    ]
    full = report.Report("q", [counted], report.judge(goals, [counted]), MACHINE)
    assert report.format_report(full).splitlines() == [
        "peak, MB        weft  torch      off",
        "a case, memory   150    100  1.2e-05",
        "",
        "goals                            seen  at most",
        "a case, memory  weft / torch    1.500    1.000  SHORT",
        "a case, memory  off           1.2e-05   0.0001     OK",
    ]


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
    results = [seen(gloo=4.0, weft=1.0), Counted("bytes", "b", {"weft": 8.0})]
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
    assert saved["counted"] == [{"table": "bytes", "case": "b", "amounts": {"weft": 8.0}}]
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


# -- all of them: scripts/bench --all and --table ----------------------------------

SAVED_MACHINE = {"cpu": "a fast one", "cores": 2, "torch": "2.13", "python": "3.11"}


def saved_answer(question: str, date: str, seen: float) -> str:
    shape = {"case": "a case", "candidate": "weft", "kind": "ratio"}
    goals = [
        shape | {"against": "gloo", "limit": 0.5, "seen": seen, "verdict": "SHORT" if seen > 0.5 else "OK"},
        shape | {"against": "alone", "limit": None, "seen": 9.0, "verdict": ""},
    ]
    medians = {"gloo": {"median_secs": 0.004}, "weft": {"median_secs": seen * 0.004}}
    cases = [{"case": "a case", "summaries": medians}]
    return json.dumps(
        {"question": question, "date": date, "machine": SAVED_MACHINE, "goals": goals, "cases": cases}
    )


def test_the_table_has_the_newest_goals_with_a_limit(tmp_path: Path) -> None:
    for name, date, seen_ratio in [
        ("b", "2026-01-02", 0.7),
        ("b", "2026-01-10", 0.25),
        ("a", "2026-01-01", 1),
    ]:
        (tmp_path / f"{name}-{date}.json").write_text(saved_answer(name, date, seen_ratio))
    assert summary.format_terminal(summary.read_newest(tmp_path), ["A remark."]).splitlines() == [
        "question  case    compared      seen  at most",
        "a         a case  weft / gloo  1.000    0.500  SHORT",
        "b         a case  weft / gloo  0.250    0.500     OK",
        "",
        "A remark.",
        "",
        "1 of 2 goals are reached. These fall short:",
        "  a, a case: weft / gloo 1.000, at most 0.500",
    ]


def test_the_page_says_where_and_when(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(saved_answer("a", "2026-01-01", 0.25))
    page = summary.format_page(summary.read_newest(tmp_path), ["c"])
    assert "1 of 1 goals are reached.\n" in page
    assert "## a\n\n2026-01-01, a fast one, 2 cores, torch 2.13, Python 3.11.\n" in page
    assert "| a case | weft / gloo | 0.250 | 0.500 | OK |" in page
    assert "## c\n\nNever run and saved.\n" in page
    assert "What falls short" not in page


def test_headlines_go_between_the_marks_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(saved_answer("a", "2026-01-01", 0.25))
    lines = [
        headlines.Headline(what, "a", "a case", against, "weft")
        for what, against in [("x", "gloo"), ("y", "z")]
    ]
    monkeypatch.setattr(headlines, "ON_CPU", lines)
    monkeypatch.setattr(headlines, "ON_GPU", lines)
    page = f"# weft\n{headlines.BEGIN}old\n{headlines.END}the rest\n"
    seen = headlines.put_headlines(page, summary.read_newest(tmp_path))
    table = (
        "2026-01-01, a fast one, 2 cores, torch 2.13, Python 3.11:\n\n| ms | against | | weft | | ratio |\n"
        "|---|---|---|---|---|---|\n| x | gloo | 4 | weft | 1 | 0.25 |\n"
    )
    assert seen == f"# weft\n{headlines.BEGIN}{table}\n{table}{headlines.END}the rest\n"
    assert headlines.put_headlines("no marks\n", summary.read_newest(tmp_path)) == "no marks\n"


def test_every_headline_was_measured() -> None:
    answers = {answer.question: answer for answer in summary.read_newest(report.RESULTS)}
    for line in headlines.ON_CPU + headlines.ON_GPU:
        assert {line.against, line.candidate} <= answers[line.question].medians[line.case].keys(), line


def test_the_saved_page_is_that_of_the_saved_files() -> None:
    answers = summary.read_newest(report.RESULTS)
    unanswered = sorted(set(command.list_questions(BENCHMARKS)) - {answer.question for answer in answers})
    page = (report.RESULTS / "SUMMARY.md").read_text()
    assert page == summary.format_page(answers, unanswered), "run `scripts/bench --table`"
    readme = (ROOT / "README.md").read_text()
    assert headlines.BEGIN in readme
    assert readme == headlines.put_headlines(readme, answers), "run `scripts/bench --table`"


QUESTION = """
import json, sys
from pathlib import Path
arguments, told = sys.argv[1:-2], Path(sys.argv[-1])
print(arguments)
BODY
if __name__ == "__main__":
    pass
"""


def write_questions(folder: Path, answer: str) -> None:
    bodies = {
        "crashes": "raise OSError('no more paper')",
        "measures": f"told.write_text({answer!r})",
        "needs_more": """told.write_text('{"question": "needs_more", "skipped": "there is no more"}')""",
    }
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(QUESTION.replace("BODY", body))
    (folder / "shared.py").write_text("x = 1\n")


def test_all_are_run_though_one_crashes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write_questions(tmp_path, saved_answer("measures", "2026-01-01", 0.75))
    (results / "m.json").write_text(saved_answer("measures", "2026-01-01", 0.75))
    assert command.main(["--all", "--rounds", "3"], tmp_path, results) == 1
    out, err = capfd.readouterr()
    assert out.count("['--save', '--rounds', '3']") == 3
    assert "no more paper" in err
    assert err.endswith("failed: crashes; see above.\n")
    assert "needs_more: skipped, since there is no more.\n" in out
    assert "crashes: failed, with exit code 1.\n" in out
    assert "  measures, a case: weft / gloo 0.750, at most 0.500\n" in out
    assert "| a case | weft / gloo | 0.750 | 0.500 | SHORT |" in (results / "SUMMARY.md").read_text()


def test_short_and_skipped_are_no_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_questions(tmp_path, saved_answer("measures", "2026-01-01", 0.75))
    (tmp_path / "crashes.py").unlink()
    assert command.main(["--quick"], tmp_path, tmp_path) == 0
    assert "['--quick']" in capfd.readouterr().out
    assert not (tmp_path / "SUMMARY.md").exists()


def test_a_benchmark_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nothing"]) == 2
    assert "there is no benchmark 'nothing'. There are: clip_grad_norm," in capsys.readouterr().err


def test_a_question_that_needs_a_gpu_says_so(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "collectives_gpu.py", "--json", told],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "collectives_gpu: skipped, since torch sees no CUDA device here.\n"
    skipped = summary.Skipped("collectives_gpu", "torch sees no CUDA device here")
    assert summary.decode_answer(told.read_text()) == skipped


@pytest.mark.parametrize("name", command.list_questions(BENCHMARKS))
def test_every_question_has_the_common_options(name: str) -> None:
    options = ["--rounds", "2", "--only", "x", "--save", "--json", "x.json"]
    assert why_broken(["scripts/bench", name, *options]) == ""
