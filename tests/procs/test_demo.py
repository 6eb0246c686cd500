"""`python -m weft demo` runs, and the command line says what is wrong with its arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weft
from weft.__main__ import main
from weft.demo import command
from weft.demo.table import format_bytes, format_table


def test_the_demo_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "weft", "demo", "--size", "0.01"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "process  ranks averaged their numbers: [0.5, 0.5]" in done.stdout
    assert "thread   ranks averaged their numbers: [0.5, 0.5]" in done.stdout
    assert "gloo / weft" in done.stdout
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        assert done.stdout.count(f"\n   {op} ") >= 3
    assert "all_reduce_coalesced (avg)" in done.stdout
    assert "What to try next" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--ranks", "0"], ["--ranks", "two"], ["--ranks", "-1"], ["--size", "0"], ["--size", "nan"], ["--fast"]],
)
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
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(weft.InternalError("boom"), 1), (KeyboardInterrupt(), 130)])
def test_a_failure_has_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(num_ranks: int, num_bytes: int) -> None:
        raise error

    monkeypatch.setattr(command, "run_tour", fail)
    assert main(["demo"]) == code
    assert str(error) in capsys.readouterr().err


def test_a_table_is_aligned() -> None:
    assert (
        format_table([["", "ms"], ["all_reduce", "0.1"]], indent=" ") == "              ms\n all_reduce  0.1"
    )


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(4, "4 B"), (4096, "4 KB"), (3 * 2**19, "1.5 MB"), (2**32, "4 GB")]
)
def test_bytes_in_words(num_bytes: int, words: str) -> None:
    assert format_bytes(num_bytes) == words
