"""A run as text, and the command that makes a report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.report.made_runs import write_run
from weft.__main__ import main
from weft.observe import draw_run, plain_files
from weft.observe.terminal import COMPUTES, HIDES, LEGEND, WAITS


def test_lanes(tmp_path: Path) -> None:
    # 3 steps that begin a second apart and take 0.8 s: 2.8 s, drawn on 56 cells of 0.05 s.
    text = draw_run(write_run(tmp_path, ranks=2, slow={1: 0.05}), 63)
    lines = text.splitlines()
    assert lines[0] == "       │step 27            │step 28            │step 29"
    step = COMPUTES * 6 + HIDES * 6 + WAITS * 2 + COMPUTES * 2
    assert lines[1] == f"rank 0 {step}    {step}    {step}"
    slow = COMPUTES * 6 + HIDES * 7 + WAITS * 1 + COMPUTES * 2
    assert lines[2] == f"rank 1 {slow}    {slow}    {slow}"
    assert lines[3].split() == ["0", "2.8", "s"]
    assert lines[5] == LEGEND
    assert lines[7:] == [
        "2 ranks made 30 steps; the median step took 800 ms.",
        "A rank gave 2 KB to collectives in an average step, which took 400 ms; 81% of that time was hidden "
        "behind computation.",
        "Rank 1 is the slowest: it computes 750 ms a step, 50 ms (7%) longer than the other, which waits.",
    ]


def test_one_rank_many_ranks_no_steps(tmp_path: Path) -> None:
    one = draw_run(write_run(tmp_path / "one", ranks=1, slow={0: 0.02}), 80)
    assert one.splitlines()[-1] == "In its median step it computes 720 ms and waits 10%."
    many = draw_run(write_run(tmp_path / "many", ranks=40, steps=2), 20).splitlines()
    assert many[1 + 32] == "and 8 ranks more"
    assert max(map(len, many[:32])) <= 40
    assert draw_run(write_run(tmp_path / "none", steps=0)) == "No step of this run was finished."


# weft report


def test_the_command_makes_all_views(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", steps=30)
    trace, board = tmp_path / "trace.json", tmp_path / "board"
    assert main(["report", str(directory), "--trace", str(trace), "--tensorboard", str(board)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "2 ranks made 30 steps" in said.out
    page = directory / "report.html"
    assert f"Page: {page}" in said.out
    assert page.read_text().startswith("<!doctype html>")
    # Without --steps the page has the last 20, the trace all.
    assert '"step 0"' in trace.read_text()
    assert "Steps 10 to 29 of 30" in page.read_text()
    assert len(list(board.rglob("events.out.tfevents.*"))) == 2
    out = tmp_path / "other.html"
    assert main(["report", str(directory), "--steps", "3:5", "--out", str(out), "--trace", str(trace)]) == 0
    assert "Steps 3 to 4 of 30" in out.read_text()
    assert '"step 3"' in trace.read_text()
    assert '"step 5"' not in trace.read_text()


def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    (tmp_path / "file").write_text("")
    cases: list[tuple[list[str], str]] = [
        ([str(tmp_path / "nowhere")], "is no directory"),
        ([str(tmp_path)], "has no run.json"),
        ([str(directory), "--out", str(tmp_path / "no" / "page.html")], "page.html"),
        ([str(directory), "--out", str(tmp_path)], f"Is a directory: '{tmp_path}'"),
        ([str(directory), "--out", "."], "Is a directory: '.'"),
        ([str(directory), "--trace", str(tmp_path / "file" / "trace.json")], "trace.json"),
        ([str(directory), "--tensorboard", str(tmp_path / "file")], "Not a directory"),
        ([str(directory), "--steps", "9:12"], "no step is in 9:12; the run has steps 0 to 2"),
    ]
    for arguments, reason in cases:
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("weft report: ")
        assert error.count("\n") == 1
        assert reason in error
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("steps", ["5", "a:b", "7:7", "9:3", "-1:4", ":x"])
def test_steps_that_are_none_are_refused(
    steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), f"--steps={steps}"])
    assert ended.value.code == 2
    assert "are no steps: give A:B" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_no_space_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    monkeypatch.setattr(plain_files, "create_new", lambda *_, **__: os.open("/dev/full", os.O_WRONLY))
    before = {*directory.iterdir()}
    assert main(["report", str(directory)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {*directory.iterdir()} == before
