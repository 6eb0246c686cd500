"""The sharded gradients of some parameters: one flat buffer, a view and a DTensor for each.

The buffer and the DTensors are used again in the next step, unless the user still holds one of them: what is
kept keeps its values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from weft.fsdp.param import ShardedParam
from weft.tensors import contiguous_strides, use_count, view_in


class GradShards:
    """Room for one step's sharded gradients."""

    def __init__(self, params: Sequence[ShardedParam], starts: Sequence[int], flat: torch.Tensor) -> None:
        self.flat = flat  # 1D, in the parameters' dtype
        self.locals = [
            view_in(flat, start, param.local_shape, contiguous_strides(param.local_shape))
            for param, start in zip(params, starts, strict=True)
        ]
        self.wrappers: list[DTensor] = [
            param.wrap_gradient(local) for param, local in zip(params, self.locals, strict=True)
        ]
        self._fresh = (self._count_names(), use_count(flat))

    def is_held(self, params: Sequence[ShardedParam]) -> bool:
        """Whether somebody has a gradient of an earlier step, be it the parameter itself."""
        if use_count(self.flat) > self._fresh[1] or self._count_names() > self._fresh[0]:
            return True
        return any(param.sharded.grad is not None for param in params)

    def _count_names(self) -> int:
        return max(map(sys.getrefcount, self.wrappers), default=0) + max(
            map(sys.getrefcount, self.locals), default=0
        )
