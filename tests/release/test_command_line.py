"""The command line: its version, which doesn't wait for torch, its help, what it says of mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft
import weft_cli
from weft.__main__ import main
from weft.training import demo

SOURCE = Path(weft.__file__).parents[1]
HELP = [command.help for command in weft_cli.COMMANDS.values()]


def test_the_version_is_one_that_installers_can_order() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", weft.__version__)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argument", "said"), [("--version", [f"weft {weft.__version__}\n"]), ("--help", HELP)]
)
def test_the_command_needs_neither_torch_nor_an_installation(argument: str, said: list[str]) -> None:
    # Without site-packages there is no torch that could be imported, and no metadata of weft.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import weft_cli; weft_cli.main()", argument],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert [text for text in said if text not in done.stdout] == []


@pytest.mark.parametrize("name", weft_cli.COMMANDS)
def test_every_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 10


def test_the_module_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"


def test_the_command_passes_other_arguments_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "plan", "gpt-7b", "--ranks", "none"])
    with pytest.raises(SystemExit) as exit_:
        weft_cli.main()
    assert exit_.value.code == 2
    assert "argument --ranks" in capsys.readouterr().err


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
