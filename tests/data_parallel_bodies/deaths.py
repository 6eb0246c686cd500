"""Training loops in which a rank dies, and what the others saw of it."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

import weft
from tests.data_parallel_bodies.libraries import DistributedDataParallel
from tests.data_parallel_bodies.twins import make_rows, mean_square, net, rows_of
from weft.testing import Fault, inject

STEPS = 6


def train_until_one_dies(folder: Path, fault: Fault, view: bool) -> None:
    """Write down which error came, of whom it spoke and after how long; then end as the rank that died did."""
    model = DistributedDataParallel(net(4), bucket_cap_mb=0.0001, gradient_as_bucket_view=view)
    began = time.monotonic()
    with inject(fault) as faults:
        for step in faults.steps(STEPS):
            began = time.monotonic()
            try:
                mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()
            except weft.PeerError as error:
                took = time.monotonic() - began
                seen = f"{type(error).__name__}\n{list(error.ranks)}\n{took}\n{step}\n{error}"
                (folder / f"seen.{dist.get_rank()}").write_text(seen)
                raise
    raise AssertionError("nobody died")


def sightings(folder: Path) -> dict[int, list[str]]:
    """By survivor: the error's name, the ranks it names, seconds, the step, its words."""
    return {
        int(path.suffix.removeprefix(".")): path.read_text().split("\n", 4)
        for path in sorted(folder.glob("seen.*"))
    }
