"""What users can set for a sharded group of parameters, at any time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from weft.fsdp.mesh import DataMesh


@dataclass(eq=False)
class Settings:
    """How one group is gathered and reduced. Ranks set the same."""

    after_forward: (
        DataMesh | None
    )  # what parameters are sharded over between forward and backward; None: whole
    reduces: bool = True
    reduces_replicas: bool = True
    reshards_after_backward: bool = True
    gathers_in_backward: bool = True
    divide_factor: float | None = None
    sums_only: bool = False  # divide by hand: for backends without other operators
    reduces_unused: bool = False  # parameters that no rank has used get zeros
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: Any = None
    custom_gather: Any = None  # torch's AllGather, of the user's
    custom_reduce: Any = None  # torch's ReduceScatter
    reduce_group: Any = None  # of the reductions alone; None: the shards'
    comm_hook: Any = None

    def order_key(self) -> Hashable:
        """What changes the order of collectives."""
        size = 0 if self.after_forward is None else self.after_forward.shard_size
        return (size, self.reduces, self.reshards_after_backward, self.gathers_in_backward)
