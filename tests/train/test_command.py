"""`weft train` as a command: what it prints on a terminal and elsewhere, and the same under torchrun."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import commands
from tests.train.runs import SMALL, alone, same_as

pytestmark = pytest.mark.processes

STEPS = ["--steps", str(SMALL.steps)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.full
def test_elsewhere_it_prints_plain_lines(tmp_path: Path) -> None:
    saved, record = tmp_path / "deep" / "saved", tmp_path / "deep" / "record"
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    done = commands.run(
        *STEPS,
        "--strategy",
        "fsdp",
        "--hook",
        "bf16",
        "--checkpoint",
        str(saved),
        "--record",
        str(record),
        "--data",
        str(text),
        starter=["-W", "error"],
    )
    assert done.returncode == 0, done.stderr
    (engine,) = done.stderr.splitlines()
    assert engine.startswith("weft: 2 ranks on backend 'weft': ")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    steps = [found for line in lines if (found := commands.LINE.fullmatch(line))]
    losses = commands.recorded(record)[1]
    assert len(losses) == SMALL.steps
    assert [(int(found[1]), int(found[2])) for found in steps][-1] == (SMALL.steps, SMALL.steps)
    assert [float(found[3]) for found in steps][-1] == round(losses[-1], 4)
    (summary,) = [line for line in lines if "2 ranks" in line]
    assert f"{losses[-1]:.4f}" in summary
    assert "fsdp" in summary
    assert f"weft report {record}" in lines[-1]
    assert [path.name for path in saved.iterdir()] == [f"step-{SMALL.steps:08}"]


def test_on_a_terminal_it_draws_a_bar() -> None:
    leader, follower = pty.openpty()
    try:
        command = subprocess.Popen(
            [sys.executable, "-m", "weft", "train", *commands.SMALL, *STEPS, "--ranks", "1"],
            env=commands.environment({"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}),
            stdout=follower,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(follower)
    with command:
        shown = _read_all(leader)
        os.close(leader)
        assert command.stderr is not None
        stderr = command.stderr.read()
        assert command.wait(60) == 0, stderr
    assert stderr == b""
    assert "\x1b[" in shown, "the bar is drawn over and over in one place"
    assert "━" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert f"{SMALL.steps}/{SMALL.steps}" in plain
    assert f"{alone()[-1]:.4f}" in plain
    for word in ("loss", "tokens/s", "compute", "waiting", "memory"):
        assert word in plain
    assert not any(commands.LINE.fullmatch(line) for line in plain.splitlines()), "lines are for elsewhere"


def _read_all(leader: int) -> str:
    """What is written to a terminal until its last writer is gone, which Linux tells as an error."""
    pieces: list[bytes] = []
    try:
        while piece := os.read(leader, 65536):
            pieces.append(piece)
    except OSError:
        pass
    return b"".join(pieces).decode()


def test_under_torchrun_it_is_the_same_run(tmp_path: Path) -> None:
    saved, record = tmp_path / "saved", tmp_path / "record"
    arguments = ["--strategy", "fsdp", "--checkpoint", str(saved), "--every", "3"]
    done = commands.run(*STEPS, *arguments, "--record", str(record), starter=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "weft train:" not in done.stderr
    for rank in (0, 1):
        assert commands.recorded(record, rank)[1] == same_as(alone())
    lines = done.stdout.splitlines()
    assert sum(line.startswith(f"step {SMALL.steps}/") for line in lines) == 1, "one rank prints"
    assert sum("2 ranks" in line for line in lines) == 1
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000003", "step-00000006"]


@pytest.mark.full
def test_uneven_ranks_under_torchrun(tmp_path: Path) -> None:
    """The command's own frames are on the stack there, below the loop's: its calls are not a Joinable's."""
    record = tmp_path / "record"
    done = commands.run(*STEPS, "--strategy", "fsdp", "--uneven", "--record", str(record), starter=TORCHRUN)
    assert done.returncode == 0, done.stderr
    first, second = (commands.recorded(record, rank)[1] for rank in (0, 1))
    assert [len(first), len(second)] == [SMALL.steps, SMALL.steps - 1]
    assert second == first[:-1] == same_as(alone()[:-1])


@pytest.mark.full
def test_a_mistake_under_torchrun_is_told_once_and_ends_all_ranks(tmp_path: Path) -> None:
    done = commands.run(
        "--data", str(tmp_path / "missing"), "--checkpoint", str(tmp_path / "saved"), starter=TORCHRUN
    )
    assert done.returncode != 0
    assert done.stderr.count("weft train: ") == 1
    assert "exitcode  : 2" in done.stderr
    assert list(tmp_path.iterdir()) == []
