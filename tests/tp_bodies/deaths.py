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
from tests.tp_bodies.models import Language, next_token_loss, sequence_plan
from tests.tp_bodies.twins import make_mesh, tokens
from weft.testing import Fault, inject

STEPS = 4


def train_until_one_dies(tp: Any, folder: Path, fault: Fault) -> None:
    """Every survivor's error, in forward or in backward, says who went."""
    rank = dist.get_rank()
    model = tp.parallelize_module(Language(), make_mesh(), sequence_plan(tp))
    with inject(fault) as faults:
        for step in faults.steps(STEPS):
            began = time.monotonic()
            try:
                next_token_loss(model, tokens(2, 9, vocabulary=12, seed=step)).backward()
            except weft.PeerError as error:
                secs = time.monotonic() - began
                ranks = list(error.ranks)
                seen = Sighting(fault.rank, rank, type(error).__name__, ranks, step, secs, str(error))
                (folder / f"sighting.{fault.rank}.{rank}").write_text(json.dumps(asdict(seen)))
                raise
    raise AssertionError("nobody died")
