"""A program that used hooks ends as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import weft
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook


def job():
    model = weft.DistributedDataParallel(torch.nn.Linear(40, 40))
    model.register_comm_hook(None, quantization_perchannel_hook)
    model(torch.ones(2, 40)).sum().backward()


if __name__ == "__main__":
    weft.launch(job, ranks=2, kind={kind!r})
"""


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_program_with_hooks_ends_well(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(kind=kind))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
