"""How a tensor is cut along one dim into a piece for each rank. Pure: shapes in, shapes out.

As torch.chunk does it: equal pieces, the last ones shorter or empty. Each rank keeps room for a whole
piece, so that all ranks give and get the same number of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor of this shape, cut along this dim for so many ranks."""

    shape: Shape
    dim: int
    num_ranks: int

    @property
    def length(self) -> int:
        """Of a full piece, along the dim."""
        return -(-self.shape[self.dim] // self.num_ranks)

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def piece_numel(self) -> int:
        """Of a full piece, the room that every rank has."""
        return math.prod(self.full_piece_shape)

    @property
    def full_piece_shape(self) -> Shape:
        """Of a full piece."""
        return self._with_length(self.length)

    @property
    def spread_numel(self) -> int:
        """Of the tensor as its pieces lie side by side: padded, unless all padding is behind the tensor."""
        return self.numel if self.is_in_order else self.num_ranks * self.piece_numel

    @property
    def is_in_order(self) -> bool:
        """Whether the pieces, one after another, are the tensor as it lies in memory."""
        return self.num_ranks == 1 or math.prod(self.shape[: self.dim]) == 1

    def span(self, rank: int) -> tuple[int, int]:
        """Where a rank's piece begins along the dim, and how long it is."""
        start = min(rank * self.length, self.shape[self.dim])
        return start, min(self.length, self.shape[self.dim] - start)

    def piece_shape(self, rank: int) -> Shape:
        """Of a rank's piece."""
        return self._with_length(self.span(rank)[1])

    def _with_length(self, length: int) -> Shape:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])
