"""torch's names for collectives, where they differ between the versions weft supports.

torch 2.13 renamed all_gather_into_tensor to all_gather_single and
reduce_scatter_tensor to reduce_scatter_single; the old names warn there and the new
ones are missing before. Functions are looked up at each call, see collectives.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.errors import ConfigError


def all_gather_single(
    out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, *, is_waited: bool = False
) -> Any:
    """Start torch's gather into one tensor."""
    start = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
    return start(out, tensor, group, async_op=not is_waited)


def reduce_scatter_single(
    out: torch.Tensor, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, *, is_waited: bool = False
) -> Any:
    """Start torch's reduce-scatter of one tensor."""
    start = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
    return start(out, tensor, op, group, async_op=not is_waited)


_OP_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_KINDS = tuple((getattr(dist.ReduceOp, name), name.lower()) for name in _OP_NAMES)


def op_name(op: Any) -> str:
    """A reduce op in lower case, as functional collectives and records name it."""
    for kind, name in _KINDS:
        if op is kind:  # torch's ops take long to hash, and Dynamo can't before torch 2.13
            return name
    for kind, name in _KINDS:
        if op == kind:  # a ReduceOp with a factor
            return name
    raise ConfigError(f"unknown reduce op {op!r}; torch.distributed.ReduceOp has {', '.join(_OP_NAMES)}.")
