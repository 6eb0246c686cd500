"""Parameters that travel together in a compiled graph, and how they lie on the way. Pure.

A rank's shard is its pieces, one behind the other, each with room for a full one; the shards of all ranks
are the rows of a table. A graph knows a cargo by its text, which is a constant of it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weft.fsdp.split import Split


@dataclass(frozen=True, slots=True)
class Cargo:
    """Parameters of one dtype, sharded over one group of ranks."""

    splits: tuple[Split, ...]
    rank: int
    num_ranks: int
    group: str  # its name, by which graphs find it
    dtype: torch.dtype  # of the shards, and of their gradients
    compute_dtype: torch.dtype  # of the whole parameters
    reduce_dtype: torch.dtype  # of gradients on their way
    op: str  # of the reduction
    before: float  # gradients are divided by this before it,
    after: float  # and by this after it

    def encode(self) -> str:
        """As a constant of a graph."""
        dtypes = [_name(dtype) for dtype in (self.dtype, self.compute_dtype, self.reduce_dtype)]
        splits = [(split.shape, split.dim) for split in self.splits]
        ranks = [self.rank, self.num_ranks, self.group]
        return json.dumps([splits, *ranks, *dtypes, self.op, self.before, self.after])

    @staticmethod
    @functools.cache
    def decode(text: str) -> Cargo:
        """From a constant of a graph."""
        splits, rank, num_ranks, group, *rest = json.loads(text)
        dtypes = [getattr(torch, name) for name in rest[:3]]
        cut = tuple(Split(tuple(shape), dim, num_ranks) for shape, dim in splits)
        return Cargo(cut, rank, num_ranks, group, *dtypes, *rest[3:])

    # Parameters

    def pack_shard(self, pieces: Sequence[Tensor]) -> Tensor:
        """This rank's pieces as its shard, in the compute dtype."""
        flat = [
            _padded(piece.to(self.compute_dtype).reshape(-1), split.piece_numel)
            for piece, split in zip(pieces, self.splits, strict=True)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def unpack_table(self, table: Tensor) -> list[Tensor]:
        """The whole parameters, of the shards of all ranks."""
        rows = table.view(self.num_ranks, -1)
        columns = rows.split([split.piece_numel for split in self.splits], dim=1)
        return [_joined(column, split) for column, split in zip(columns, self.splits, strict=True)]

    # Gradients

    def pack_table(self, grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Every rank's part of the gradients, in the reduce dtype. None counts as zeros."""
        columns = [
            like.new_zeros(self.num_ranks, split.piece_numel, dtype=self.reduce_dtype)
            if grad is None
            else _cut(grad.to(self.reduce_dtype), split)
            for grad, split in zip(grads, self.splits, strict=True)
        ]
        table = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return (table if self.before == 1.0 else table / self.before).reshape(-1)

    def unpack_shard(self, shard: Tensor) -> list[Tensor]:
        """The gradients of this rank's pieces, of its part of the reduced ones."""
        shard = (shard if self.after == 1.0 else shard / self.after).to(self.dtype)
        parts = shard.split([split.piece_numel for split in self.splits])
        shapes = [split.piece_shape(self.rank) for split in self.splits]
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def only(self, wanted: Sequence[bool]) -> Cargo:
        """The same for some of the parameters."""
        splits = tuple(split for split, is_wanted in zip(self.splits, wanted, strict=True) if is_wanted)
        return Cargo(splits, self.rank, self.num_ranks, self.group, *self._rest())

    def _rest(self) -> tuple[torch.dtype, torch.dtype, torch.dtype, str, float, float]:
        return self.dtype, self.compute_dtype, self.reduce_dtype, self.op, self.before, self.after


def _padded(flat: Tensor, numel: int) -> Tensor:
    missing = numel - flat.numel()
    return functional.pad(flat, (0, missing)) if missing else flat


def _joined(column: Tensor, split: Split) -> Tensor:
    """A whole parameter, of the rows that hold its pieces."""
    if split.is_in_order:
        return column.contiguous().view(-1)[: split.numel].view(split.shape)
    shapes = [split.piece_shape(rank) for rank in range(split.num_ranks)]
    pieces = [row[: math.prod(shape)].view(shape) for row, shape in zip(column, shapes, strict=True)]
    return torch.cat(pieces, dim=split.dim)


def _cut(grad: Tensor, split: Split) -> Tensor:
    """A row for each rank with its piece of a gradient."""
    if split.is_in_order:
        flat = _padded(grad.reshape(-1), split.num_ranks * split.piece_numel)
        return flat.view(split.num_ranks, split.piece_numel)
    pieces = [grad.narrow(split.dim, *split.span(rank)) for rank in range(split.num_ranks)]
    return torch.stack([_padded(piece.reshape(-1), split.piece_numel) for piece in pieces])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
