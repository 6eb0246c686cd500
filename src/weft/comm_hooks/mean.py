"""The plain mean over a group: what hooks do with a bucket that they leave as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from weft import comm

FEATURE = "ddp"


def launch_mean(tensor: torch.Tensor, group: ProcessGroup) -> comm.Handle[torch.Tensor]:
    """Start an all-reduce that leaves the mean in the tensor, dense or sparse."""
    size = group.size()
    if tensor.is_floating_point() or tensor.is_complex():
        # Divided first: a sum of many 16-bit numbers overflows before its mean does.
        tensor.div_(size)
        return comm.all_reduce(tensor, group=group, feature=FEATURE)
    total = comm.all_reduce(tensor, group=group, feature=FEATURE)
    return total.then(lambda sums: sums.copy_(torch.div(sums, size, rounding_mode="trunc")))


def is_lossy_safe(tensor: torch.Tensor) -> bool:
    """Whether a hook may compress it: real floating-point numbers in a dense buffer."""
    return tensor.layout is torch.strided and tensor.is_floating_point()


def only_tensor(value: Any) -> torch.Tensor:
    """What a hook's future brought: a tensor, or a list with one."""
    return value if isinstance(value, torch.Tensor) else value[0]
