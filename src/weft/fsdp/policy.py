"""What a user decides about `fully_shard` as plain values: dtypes, offloading, the axes that share data.

Names and meanings are torch's. Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.errors import ConfigError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's whole parameters, of its gradients on their way, and of its results.

    Shards keep the dtype that the parameters had, so that the optimizer steps in it.

    `param_dtype`: of floating-point parameters in forward and backward, and on their way to the ranks;
    None for their own.
    `reduce_dtype`: of gradients while they are reduced, and while they accumulate unreduced; None for the
    dtype that backward gives them.
    `output_dtype`: what floating-point tensors that forward returns are cast to; None leaves them.
    `cast_forward_inputs`: whether floating-point tensors given to forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Where shards rest between uses. This one, the default, leaves them on the mesh's device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's state rest in the CPU's memory; it steps there.

    `pin_memory`: rest in page-locked memory. Copies then overlap with work on the device, and the pages
    can't be used by others.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh share data, by name, where parameters are DTensors on the whole of that mesh.

    `shard`: the axes that parameters are split over. `replicate`: those that hold the same shards. Several
    names act as one axis. Raises ConfigError when neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "At least one of shard or replicate must be set in DataParallelMeshDims. Name the mesh axes "
                "that parameters are split over as shard, those that hold the same shards as replicate."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to split over; empty for none."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that hold the same shards; empty for none."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
