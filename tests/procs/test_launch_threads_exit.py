"""launch(kind="thread") on gloo with a rank that raises: its peers are woken, and the process exits well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

REPO = Path(__file__).parents[2]

# Rank 0 waits for rank 1 in a collective of gloo, which nothing but the end of rank 1's group can wake. The
# process exits with what torch and gloo have left: an abort there would be exit code 134.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import weft

def fn():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(4))

try:
    weft.launch(fn, ranks=2, kind="thread", backend="gloo", grace=60)
except weft.LaunchError as error:
    assert "rank 1 of 2 raised ValueError: on purpose" in str(error)
    assert "rank 0 raised" in str(error), error
    sys.exit(1)
"""


@pytest.mark.parametrize("together", [2] * 5)
def test_after_a_failed_rank_the_process_exits_with_its_own_code(together: int) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(together)
    ]
    for run in runs:
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 1, stderr
        assert stderr.count("\n") == 1, f"more than the line that names the backend: {stderr}"
