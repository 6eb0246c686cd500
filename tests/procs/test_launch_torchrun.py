"""init() under torchrun: the same script that runs alone runs as many ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

SCRIPT = """
import torch
import torch.distributed as dist
from weft.launcher import init

world = init()
tensor = torch.tensor([float(world.rank + 1)])
dist.all_reduce(tensor)
assert init(backend=world.backend) == world
text = f"{world.rank} of {world.size}, local {world.local_rank}, {world.backend}, sum {tensor.item()}\\n"
print(text, end="")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("starter", "lines"),
    [
        ([], ["0 of 1, local 0, weft, sum 1.0"]),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            ["0 of 2, local 0, weft, sum 3.0", "1 of 2, local 1, weft, sum 3.0"],
        ),
    ],
    ids=["alone", "torchrun"],
)
def test_script_runs_alone_and_under_torchrun(starter: list[str], lines: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, *starter, str(script)],
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n"))[1:] == lines
