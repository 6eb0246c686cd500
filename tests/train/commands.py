"""`weft train` as a command: started, watched through its output, and read through its record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]

# The options of runs.SMALL but for the steps, as arguments.
SMALL = ["--context", "16", "--batch", "8", "--rate", "0.003", "--warmup", "0", "--decay", "200"]

LINE = re.compile(
    r"step +(\d+)/(\d+)  loss (\d+\.\d+)  tokens/s [\d,]+  "
    r"compute [\d.]+ m?s  communication [\d.]+ m?s  waiting [\d.]+ m?s  memory [\d.]+ [KMG]B"
)


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's environment, without what a launcher of ranks would have put there."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return mine | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"} | dict(more)


def start(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "weft", "train", *SMALL, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def run(
    *arguments: str, env: Mapping[str, str] = {}, starter: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(starter or []), "-m", "weft", "train", *SMALL, *arguments],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def recorded(directory: Path, rank: int = 0) -> tuple[int, list[float]]:
    """A rank's process and the losses of its steps, from the record of a run, whole or broken off."""
    text = (directory / f"rank-{rank:05}.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    assert entries[0]["kind"] == "rank"
    return entries[0]["pid"], [entry["loss"] for entry in entries if entry["kind"] == "step"]


def wait_for_step(command: subprocess.Popen[str], step: int) -> None:
    """Read the command's output up to this step's line."""
    assert command.stdout is not None
    seen: list[str] = []
    for line in command.stdout:
        seen.append(line)
        found = LINE.match(line)
        if found is not None and int(found[1]) >= step:
            return
    raise AssertionError(f"the command ended before step {step}: {''.join(seen)}")


def wait_until_ended(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert wait_readable([pidfd], 60), "a process was left behind"
        os.close(pidfd)


def expect_one_line(stderr: str) -> str:
    """The one line that a mistake comes to."""
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("weft train: "), stderr
    assert "Traceback" not in stderr
    return stderr
