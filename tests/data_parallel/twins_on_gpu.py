"""What the GPU's tests of data parallel share: twins on the GPU, and a hook for a world of one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.twins import Twin, make_rows
from weft.comm_hooks import GradBucket

BUSY_CYCLES = 20_000_000  # some ten milliseconds: whoever doesn't wait for the GPU reads stale numbers


def reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a group of one rank would leave out: a call for each bucket."""
    return weft.comm.all_reduce(bucket.buffer()).future()


def make_twin(model: nn.Module, **options: Any) -> Twin:
    twin = Twin(model.cuda(), **options)
    if dist.get_world_size() == 1:
        twin.parallel.register_comm_hook(None, reduce_hook)
    return twin


def rows_on_gpu(seed: int = 1, **options: Any) -> torch.Tensor:
    return make_rows(seed, **options).cuda()
