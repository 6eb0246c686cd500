"""The batch scripts of the documents run as they stand, on a SLURM of two hosts that are this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.commands import find_blocks, find_scripts

pytestmark = pytest.mark.processes

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "gpus_and_hosts.md").read_text()
WITH_TORCHRUN, WITHOUT_TORCHRUN = find_scripts(PAGE)

# What the scripts find on a host of a SLURM job: names of hosts, a way to start tasks, an environment.
SCONTROL = 'echo 127.0.0.1\necho "$3" >&2\n'
SRUN = """
while [[ "$1" == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=0 "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
JOB = {
    "SLURM_JOB_NODELIST": "host-[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job that was submitted in `tmp_path`."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    for name, text in [("scontrol", SCONTROL), ("srun", SRUN)]:
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (programs / name).chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n")
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    number = str(os.getpid() % 10000)  # the port follows from it
    where = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": number, "PATH": path}
    return {**os.environ, **JOB, **where, "PYTHONPATH": str(REPO / "src")}


def run(script: str, job: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    where = Path(job["SLURM_SUBMIT_DIR"])
    (where / "train.sbatch").write_text(script)
    return subprocess.run(
        ["bash", "train.sbatch", *options], cwd=where, env=job, capture_output=True, text=True, timeout=280
    )


def test_the_script_with_torchrun(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()  # of a run that was requeued before its first checkpoint
    done = run(WITH_TORCHRUN, job, "--steps", "2", "--every", "1", "--batch", "2", "--context", "16")
    assert done.returncode == 0, done.stderr
    assert "of 381,600 parameters on 2 ranks (fsdp)" in done.stdout
    assert (tmp_path / "saved" / "step-00000002").is_dir()
    assert "host-[0-1]" in done.stderr  # what the hosts' names were asked for
    assert list(tmp_path.glob(".secret*")) == []


def test_the_script_without_torchrun(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(find_blocks(PAGE, "python")[0])
    done = run(WITHOUT_TORCHRUN, job)
    assert done.returncode == 0, done.stderr
    assert "weft: 2 ranks on backend 'weft': ranks of one host that have no GPU" in done.stderr


def test_a_rank_that_fails_fails_the_script(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nsys.exit(int(os.environ['RANK']))\n")
    assert run(WITHOUT_TORCHRUN, job).returncode == 1
