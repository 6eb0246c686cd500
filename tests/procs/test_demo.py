"""`python -m weft demo` trains, compares and draws; the command line says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.__main__ import main
from weft.training import demo


def test_the_demo_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "weft", "demo", "--steps", "4", "--context", "16"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "step 4/4  loss" in done.stdout
    assert "(equal: never more than" in done.stdout
    assert "What to try next" in done.stdout
    assert json.loads((tmp_path / "weft-demo" / "run.json").read_text())["strategy"] == "ddp"
    assert "<html" in (tmp_path / "weft-demo" / "report.html").read_text()


def test_losses_that_differ_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    demo.compare((2.0, 1.0), (2.0, 1.0005), "2 ranks", is_exact=True)
    with pytest.raises(weft.InternalError, match="apart"):
        demo.compare((2.0, 1.0), (2.0, 1.002), "2 ranks", is_exact=True)
    demo.compare((2.0, 1.0), (2.0, 1.002), "2 ranks", is_exact=False)
    assert capsys.readouterr().out.count("different") == 2


@pytest.mark.parametrize("arguments", [["--ranks", "two"], ["--strategy", "dance"], ["--fast"]])
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *arguments])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_unknown_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["dance"])
    assert exit_.value.code == 2
    assert "dance" in capsys.readouterr().err


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "train", "report"))


@pytest.mark.parametrize(
    ("error", "code"),
    [(weft.InternalError("boom"), 1), (weft.ConfigError("bad"), 2), (KeyboardInterrupt(), 130)],
)
def test_a_failure_has_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    assert main(["demo"]) == code
    assert str(error) in capsys.readouterr().err
