"""The examples run from their command line, as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_transformer_plan_runs() -> None:
    options = ["--sequence-parallel", "--data-parallel", "fully_shard", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "transformer_plan.py", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["step", "four", "ranks", "alone"]
    assert [line[0] for line in lines[1:]] == ["0", "1", "2"]
    assert float(lines[3][2]) < float(lines[1][2])
