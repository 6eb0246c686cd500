"""kill -9 of a rank, of all ranks, of the command, of whoever writes: what is left is whole, and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train import commands
from tests.train.faults import killed_in
from tests.train.runs import SMALL, alone, run_each, same_as
from weft.__main__ import main
from weft.errors import LaunchError
from weft.launcher import RankPool
from weft.testing.pool import shared_pool
from weft.training import Checkpoints

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("strategy", "victim"), [("fsdp", 1), ("rpc", 0)])
def test_after_the_kill_of_a_rank_resume_gives_the_unbroken_curve(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    saved, before, after = tmp_path / "saved", tmp_path / "before", tmp_path / "after"
    arguments = ["--strategy", strategy, "--checkpoint", str(saved), "--every", "8"]
    # Far more steps than it will make, so that the kill comes in the middle however late it comes.
    with commands.start(*arguments, "--steps", "400", "--record", str(before)) as command:
        commands.wait_for_step(command, 10)
        pids = [commands.recorded(before, rank)[0] for rank in (0, 1)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[victim], signal.SIGKILL)
        _, stderr = command.communicate(timeout=120)
        assert command.returncode == 1, stderr
    told = [line for line in stderr.splitlines() if line.startswith("weft train: ")]
    assert len(told) == 1, stderr
    assert f"rank {victim} of 2 died: killed by SIGKILL" in told[0]
    assert f"rank {1 - victim} raised:" in stderr, "the other's traceback follows"
    commands.wait_until_ended(pidfds)

    newest = Checkpoints(saved).steps()[-1]
    resumed = commands.run(
        *arguments, "--steps", str(newest + 3), "--keep", "1", "--record", str(after), "--resume"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"step-{newest:08}" in resumed.stdout, "the run says where it goes on from"
    losses = commands.recorded(before)[1][:newest] + commands.recorded(after)[1]
    unbroken = replace(SMALL, ranks=2, strategy=strategy, steps=newest + 3)
    (outcome,) = shared_pool(2).run(run_each, args=((unbroken,),), timeout=100)[0]
    assert losses == list(outcome.losses), "to the bit"
    assert losses[:6] == same_as(alone())
    assert [path.name for path in saved.iterdir()] == [f"step-{newest + 3:08}"]


@pytest.mark.full
@pytest.mark.parametrize("point", ["write_data", "finish"])
def test_killed_while_it_writes_a_checkpoint(
    point: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    options = replace(SMALL, ranks=2, checkpoint=saved, every=2)
    pool = RankPool(2, grace=1.0)
    try:
        with pytest.raises(LaunchError, match="killed by SIGKILL"):
            pool.run(killed_in, args=(point, options), timeout=120)
    finally:
        pool.kill()
    # What was being written is there, but not under a checkpoint's name.
    assert Checkpoints(saved).steps() == [2]
    left = [path.name for path in saved.iterdir()]
    assert len(left) == 3
    assert ".lock" in left, "of the killed run, which nobody has to respect any more"
    capfd.readouterr()

    record = tmp_path / "record"
    where = ["--checkpoint", str(saved), "--every", "2", "--record", str(record)]
    assert main(["train", *commands.SMALL, "--steps", str(SMALL.steps), *where, "--resume"]) == 0
    assert "step-00000002" in capfd.readouterr().out
    assert commands.recorded(record)[1] == same_as(alone()[2:])
    assert sorted(path.name for path in saved.iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_do_not_outlive_the_command(number: int, code: int, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with commands.start("--steps", "100000", "--record", str(record)) as command:
        commands.wait_for_step(command, 1)
        pidfds = [os.pidfd_open(commands.recorded(record, rank)[0]) for rank in (0, 1)]
        command.send_signal(number)
        _, stderr = command.communicate(timeout=120)
        assert command.returncode == code, stderr
    commands.wait_until_ended(pidfds)
    assert "Traceback" not in stderr


@pytest.mark.full
def test_a_death_at_any_moment_of_writing_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.crashes", str(tmp_path)],
        cwd=commands.REPO,
        env=commands.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    deaths = int(re.findall(r"died at (\d+) calls", done.stdout)[0])
    assert deaths >= 10


@pytest.mark.full
def test_the_script() -> None:
    """scripts/kills: a few kills of writers, as a user runs it."""
    done = subprocess.run(
        [sys.executable, commands.REPO / "scripts" / "kills", "--of", "checkpoints", "--kills", "8"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "8 of 8 kills of writers of checkpoints" in done.stdout
