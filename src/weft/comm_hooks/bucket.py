"""What a gradient hook is given: one bucket of gradients, and where its parts lie.

A hook is any callable `(state, bucket) -> Future[Tensor]`. It is called when the bucket
is full, in the same order on every rank, and its future brings what the bucket's buffer
shall hold: the mean over the ranks, by custom. Dividing is the hook's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from weft.tensors import dense_strides


class GradBucket:
    """Gradients that travel together, as one flat buffer (or one sparse tensor)."""

    __slots__ = ("_buffer", "_index", "_is_last", "_offsets", "_parameters", "_sharers", "_wanted", "label")

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,  # 1D, or one parameter's sparse gradient
        parameters: Sequence[torch.Tensor],
        offsets: Sequence[int] | None = None,  # of each in the buffer; one after the other if None
        *,
        is_last: bool,
        wanted: tuple[int, int] | None = None,
        sharers: tuple[int, ...] | None = None,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._offsets = _packed(parameters) if offsets is None else offsets
        self._is_last = is_last
        self._wanted = wanted
        self._sharers = sharers
        self.label = f"bucket {index}"  # in records

    def index(self) -> int:
        """The bucket's place in the order in which buckets are reduced, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat gradients (1-D), or the sparse gradient of a bucket that holds one."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the buffer's place, a compressed one for example."""
        self._buffer = buffer

    def with_buffer(self, buffer: torch.Tensor) -> GradBucket:
        """The same bucket around another tensor of the same layout; this one stays as it is."""
        return self._with(buffer, self._wanted)

    def as_whole(self) -> GradBucket:
        """The same bucket, of which this rank needs all parts."""
        return self._with(self._buffer, None)

    def _with(self, buffer: torch.Tensor, wanted: tuple[int, int] | None) -> GradBucket:
        other = GradBucket(
            self._index,
            buffer,
            self._parameters,
            self._offsets,
            is_last=self._is_last,
            wanted=wanted,
            sharers=self._sharers,
        )
        other.label = self.label
        return other

    def wanted(self) -> tuple[int, int] | None:
        """Which of how many equal parts of the buffer this rank needs; None: all of it.

        A sharded module needs its shard's part only: the i-th on the i-th of its `sharers`. A hook may leave
        anything in the others.
        """
        return self._wanted

    def sharers(self) -> tuple[int, ...] | None:
        """The ranks of the world that a module is sharded over, by part; None: it is not sharded."""
        return self._sharers

    def wanted_part(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """What this rank needs of the buffer, or of a tensor that is laid out as the buffer is."""
        tensor = self._buffer if tensor is None else tensor
        if self._wanted is None:
            return tensor
        part, num_parts = self._wanted
        numel = tensor.numel() // num_parts
        return tensor.narrow(0, part * numel, numel)

    def gradients(self) -> list[torch.Tensor]:
        """Each parameter's gradient, as a view of the buffer in the parameter's shape.

        It lies there as the parameter does: with its strides, where they leave no gaps.
        """
        if self._buffer.layout is not torch.strided:
            return [self._buffer]
        start = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(param.shape, dense_strides(param.shape, param.stride()), start + offset)
            for param, offset in zip(self._parameters, self._offsets, strict=True)
        ]

    def pieces(self) -> list[torch.Tensor]:
        """Each gradient's numbers in the order in which they lie, as a contiguous view of the same shape.

        For hooks that take any order of the numbers for good, as long as ranks agree on it.
        """
        return [
            self._buffer.narrow(0, offset, param.numel()).view(param.shape)
            for param, offset in zip(self._parameters, self._offsets, strict=True)
        ]

    def starts(self) -> tuple[int, ...]:
        """Where each parameter's gradient begins in the buffer."""
        return tuple(self._offsets)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last

    def __repr__(self) -> str:
        last = ", the last" if self._is_last else ""
        return f"GradBucket({self._index}{last}: {len(self._parameters)} parameters, {self._buffer.dtype})"


GradHook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def _packed(parameters: Sequence[torch.Tensor]) -> list[int]:
    offsets = [0]
    for param in parameters[:-1]:
        offsets.append(offsets[-1] + math.prod(param.shape))
    return offsets
