"""Twenty workers killed in a storm of calls. scripts/rpc_kills does it for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rpc_bodies.kills import kill_guests, kill_in_worlds

SCRIPT = Path(__file__).parents[2] / "scripts" / "rpc_kills"


@pytest.mark.parametrize("seed", range(5))
def test_worlds_that_lose_all_but_one(seed: int) -> None:
    kill_in_worlds(seed)


def test_guests_of_a_late_group() -> None:
    kill_guests(10, seed=100)


def test_the_script() -> None:
    assert os.access(SCRIPT, os.X_OK)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 kills" in done.stdout
