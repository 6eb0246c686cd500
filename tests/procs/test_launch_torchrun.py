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
from weft.trust import job_secret

world = init()
if world.size > 1:  # nobody gave them a secret: all have the one that rank 0 made
    derived = [None] * world.size
    dist.all_gather_object(derived, job_secret().derive("test"))
    assert len(set(derived)) == 1, derived
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
    said = "weft: 2 ranks on backend 'weft': ranks of one host that have no GPU"
    assert finished.stderr.count(said) == (1 if starter else 0)
