"""The plain mean over a group: what hooks do with a bucket that they leave as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.errors import StateError

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


def settle(value: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The bucket's buffer with what a hook's future brought in it; the mean itself where it is sparse."""
    mean = only_tensor(value)
    if mean.layout is not torch.strided:
        return mean
    if mean.data_ptr() != buffer.data_ptr():
        buffer.copy_(mean)
    return buffer


def only_tensor(value: Any) -> torch.Tensor:
    """What a hook's future brought: a tensor, or a list with one. Raises for anything else."""
    if isinstance(value, list | tuple) and len(value) == 1:  # type: ignore[arg-type]
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise StateError(f"a gradient hook's future must bring a tensor, it brought {type(value).__name__}.")
    return value
