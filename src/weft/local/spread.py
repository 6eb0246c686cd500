"""What weft.comm asks of a local group beside c10d's collectives, as methods of LocalGroup.

Shards and whole tensors move as a Spread lays them out (spread_moves.py), and ranks
tell each other integers. All of them wait in the group's lane with the other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.local.arguments import DEFAULTS, Options
from weft.local.arithmetic import plan_fold, resolve_reduce_op, with_arithmetic
from weft.local.calls import Op
from weft.local.memory import CpuMemory
from weft.tensors.spread import Spread

if TYPE_CHECKING:
    from weft.local.group import LocalGroup

_AT_ONCE = Options(asyncOp=False)


def can_spread(self: LocalGroup, tensor: torch.Tensor) -> bool:
    """Whether the group moves such tensors from shards to wholes by itself. All ranks answer the same."""
    memory = self.engine.cpu.memory
    return tensor.is_cpu and isinstance(memory, CpuMemory) and memory.is_direct


def all_gather_spread(
    self: LocalGroup, whole: torch.Tensor, shard: torch.Tensor, spread: Spread
) -> dist.Work:
    """Read every rank's flat shard into the places of its pieces in the flat whole."""

    def task(secs: float) -> None:
        self.engine.spreading.all_gather(whole, shard, spread, secs)

    return self._submit(Op.ALL_GATHER_SPREAD, [whole], DEFAULTS, task)


def reduce_scatter_spread(
    self: LocalGroup, out: torch.Tensor, tensors: Sequence[torch.Tensor | None], spread: Spread, op: Any
) -> dist.Work:
    """Reduce every rank's contiguous tensors; the flat `out` gets this rank's pieces."""
    name, _ = resolve_reduce_op(op)
    target = with_arithmetic(out, name)
    fold = plan_fold(name, target.dtype, self.engine.size)

    def task(secs: float) -> None:
        self.engine.spreading.reduce_scatter(target, tensors, spread, fold, secs)

    return self._submit(Op.REDUCE_SCATTER_SPREAD, [out], DEFAULTS, task)


def exchange_rows(self: LocalGroup, rows: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    """Every rank's integers into `rows`, a row a rank."""

    def task(secs: float) -> None:
        told = self.engine.cpu.movements.exchange_counts(mine.tolist(), secs, Op.EXCHANGE_ROWS)
        rows.copy_(torch.tensor(told).view(rows.shape))

    return self._submit(Op.EXCHANGE_ROWS, [rows], _AT_ONCE, task)
