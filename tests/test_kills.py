"""scripts/kills: a few kills of each kind, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.full]

SCRIPT = Path(__file__).parents[1] / "scripts" / "kills"


@pytest.mark.parametrize(
    ("kind", "kills", "what"),
    [
        ("rpc", 2, "2 of 2 kills of RPC workers"),
        ("local", 3, "3 of 3 kills of ranks"),
    ],
)
def test_the_script(kind: str, kills: int, what: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--of", kind, "--kills", str(kills)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert what in done.stdout
