"""What users decide about a group of parameters as plain values: dtypes, offloading, and settings.

Names and meanings of the policies are torch's. Nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from weft.fsdp.mesh import DataParallelMesh


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's unsharded parameters, of the reduction of its gradients, and of its outputs.

    Shards keep the dtype that the parameters had; the optimizer steps in it.

    `param_dtype`: of floating-point parameters in forward and backward, and in the all-gather; None for
    their own.
    `reduce_dtype`: of gradients while they are reduced, and while they accumulate unreduced; None for the
    dtype that backward gives them.
    `output_dtype`: what floating-point outputs of forward are cast to; None leaves them.
    `cast_forward_inputs`: whether floating-point inputs of forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """The device of the shards. This one, the default, leaves them on the mesh's device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and the optimizer's state in the CPU's memory; the optimizer steps there.

    `pin_memory`: in page-locked memory. Copies then overlap with work on the device, and the pages can't be
    used by others.
    """

    pin_memory: bool = True


@dataclass(eq=False)
class GroupSettings:
    """What users may set for a group at any time; equal on all ranks."""

    # What parameters are sharded over between forward and backward; None keeps them unsharded.
    post_forward_mesh: DataParallelMesh | None
    reduces_grads: bool = True
    all_reduces_grads: bool = True  # over the replicas
    reshards_after_backward: bool = True
    unshards_in_backward: bool = True
    gradient_divide_factor: float | None = None
    sums_only: bool = False  # divide by hand: for backends without other operators
    reduces_unused: bool = False  # parameters that no rank has used get zeros
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: Any = None
    custom_all_gather: Any = None  # torch's AllGather, of the user's
    custom_reduce_scatter: Any = None  # torch's ReduceScatter, of the user's
    reduce_scatter_group: Any = None  # None: the shard group
    comm_hook: Any = None

    def order_key(self) -> Hashable:
        """What changes the order of collectives."""
        size = 0 if self.post_forward_mesh is None else self.post_forward_mesh.shard_size
        return (size, self.reduces_grads, self.reshards_after_backward, self.unshards_in_backward)
