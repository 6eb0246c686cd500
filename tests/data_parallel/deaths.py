"""Training loops in which ranks die, one after another, and what the others saw of it.

Each round trains with the ranks that are left, in a group of their own; the last of
them is the round's victim. A run that loses a rank returns no results, so what a
survivor sees it writes into a file.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import weft
from tests.data_parallel.libraries import DistributedDataParallel
from tests.data_parallel.twins import all_ranks, make_rows, mean_square, net, rows_of
from weft.testing import Fault, inject

STEPS = 5


@dataclass(frozen=True)
class Round:
    """How the victim goes, and how long the others wait for one that says nothing."""

    fault: Fault
    timeout_secs: float
    view: bool


@dataclass(frozen=True)
class Sighting:
    """What one survivor saw of one victim."""

    victim: int
    rank: int
    error: str  # the type's name
    ranks: list[int]
    step: int
    secs: float
    message: str


def train_until_only_one_is_left(folder: Path, rounds: Sequence[Round]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [
        dist.new_group(list(range(world_size - i)), timeout=timedelta(seconds=round.timeout_secs))
        for i, round in enumerate(rounds)
    ]
    pids = all_ranks(os.getpid())
    for group, round in zip(groups, rounds, strict=True):
        sighting = train_until_one_dies(group, round)
        if round.fault.action == "stop" and rank == 0:
            os.kill(pids[round.fault.rank], signal.SIGKILL)  # the launcher would, but only after its grace
        (folder / f"sighting.{sighting.victim}.{rank}").write_text(json.dumps(asdict(sighting)))
    raise RuntimeError("as was to be seen")


def train_until_one_dies(group: dist.ProcessGroup, round: Round) -> Sighting:
    model = DistributedDataParallel(
        net(4), process_group=group, bucket_cap_mb=0.0001, gradient_as_bucket_view=round.view
    )
    with inject(round.fault) as faults:
        for step in faults.steps(STEPS):
            began = time.monotonic()
            try:
                mean_square(model, rows_of(make_rows(step), dist.get_rank()), 0).backward()
            except weft.PeerError as error:
                secs = time.monotonic() - began
                name, ranks = type(error).__name__, list(error.ranks)
                return Sighting(round.fault.rank, dist.get_rank(), name, ranks, step, secs, str(error))
    raise AssertionError("nobody died")


def sightings(folder: Path) -> list[Sighting]:
    """What all survivors saw, victim by victim."""
    seen = [Sighting(**json.loads(path.read_text())) for path in folder.glob("sighting.*")]
    return sorted(seen, key=lambda sighting: (-sighting.victim, sighting.rank))
