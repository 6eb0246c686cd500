"""A TP rank goes in the middle of a step, and what the others see of it.

A run that loses a rank returns no results, so what a survivor sees it writes into a file.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weft
from tests.data_parallel_bodies.deaths import Sighting
from tests.tp_bodies.models import Stacked, mlp_plan
from tests.tp_bodies.twins import filled, make_mesh, numbers
from weft.testing import Fault, inject

STEPS = 4


def train_until_one_dies(tp: Any, folder: Path, fault: Fault) -> None:
    """Every survivor's error, in forward or in backward, says who went. A step has two sums each way."""
    rank = dist.get_rank()
    model = tp.parallelize_module(filled(Stacked()), make_mesh(), mlp_plan(tp, "layers.*."))
    with inject(fault) as faults:
        for step in faults.steps(STEPS):
            began = time.monotonic()
            try:
                model(numbers(4, 8, seed=step).requires_grad_()).square().sum().backward()
            except weft.PeerError as error:
                secs = time.monotonic() - began
                ranks = list(error.ranks)
                seen = Sighting(fault.rank, rank, type(error).__name__, ranks, step, secs, str(error))
                (folder / f"sighting.{fault.rank}.{rank}").write_text(json.dumps(asdict(seen)))
                raise
    raise AssertionError("nobody died")
