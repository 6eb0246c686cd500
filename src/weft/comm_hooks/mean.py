"""The plain mean over a group: what hooks do with a bucket that they leave as it is.

Of a sharded module's bucket a rank needs one part. Where the hook's group is the one that the module
is sharded over, the mean is a reduce-scatter into that part: half of an all-reduce's traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.in_order import finish_in_order, launch_in_order
from weft.errors import StateError

FEATURE = "ddp"


def feature_of(bucket: GradBucket) -> str:
    """Whose gradients they are, for records."""
    return FEATURE if bucket.sharers() is None else "fsdp"


def is_scattered(bucket: GradBucket, group: ProcessGroup) -> bool:
    """Whether a mean over the group is to end in parts: each rank of the group needs another one.

    By all ranks of the group and not by this one's place in it: ranks must agree.
    """
    if bucket.wanted() is None or group.size() == 1:
        return False
    return bucket.sharers() == state_of(group).ranks


def average(bucket: GradBucket, group: ProcessGroup) -> Future[torch.Tensor]:
    """The mean, as far as it is wanted, by one collective behind those of the buckets before."""
    start = finish_in_order if is_scattered(bucket, group) else launch_in_order
    return start(group, bucket.buffer(), lambda: launch_bucket_mean(bucket, group))


def launch_bucket_mean(bucket: GradBucket, group: ProcessGroup) -> comm.Handle[torch.Tensor]:
    """Start to leave the mean in the bucket's buffer, as far as it is wanted."""
    buffer, feature = bucket.buffer(), feature_of(bucket)
    if not is_scattered(bucket, group) or not is_divisible(buffer):
        return launch_mean(buffer, group, feature, bucket.label)
    whole, part = buffer.div_(group.size()), bucket.wanted_part()
    if buffer.is_complex():
        whole, part = torch.view_as_real(whole), torch.view_as_real(part)
    handle = comm.reduce_scatter_tensor(part, whole, group=group, feature=feature, label=bucket.label)
    return handle.then(lambda _: buffer)


def is_divisible(tensor: torch.Tensor) -> bool:
    """Whether a mean is a sum of quotients."""
    return tensor.is_floating_point() or tensor.is_complex()


def launch_mean(
    tensor: torch.Tensor, group: ProcessGroup, feature: str = FEATURE, label: str = ""
) -> comm.Handle[torch.Tensor]:
    """Start an all-reduce that leaves the mean in the tensor, dense or sparse."""
    size = group.size()
    if is_divisible(tensor):
        # Divided first: a sum of many 16-bit numbers overflows before its mean does.
        tensor.div_(size)
        return comm.all_reduce(tensor, group=group, feature=feature, label=label)
    total = comm.all_reduce(tensor, group=group, feature=feature, label=label)
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
