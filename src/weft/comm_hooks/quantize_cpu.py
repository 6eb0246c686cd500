"""Quantize, add up and restore a bucket's chunks on a CPU: row by row, in few calls.

The numbers are those of quantize.py, which says what codes and scales are. There rows are
worked on many at a time, and their scales are tensors. But the calls on tensors of one
number take as long as two passes over a long row; so here a scale is a Python float. A row
is worked on in place, and short enough to stay in a core's cache from call to call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from weft.comm_hooks.quantize import LIMITS, TINY, Own, open_message, open_received
from weft.comm_hooks.quantize_plan import Chunk, QuantizePlan

# Shorter rows are better worked on many at a time.
_LEAST_MEAN_ROW_NUMEL = 1 << 11
# 1.5 * 2^23: a float32 of this size has no bits for fractions. Adding it rounds, to even, and leaves
# the rounded number in the low byte as an int8 would have it.
_ROUNDER = 12582912.0


def is_usable(buffer: torch.Tensor, plan: QuantizePlan) -> bool:
    """Whether the bucket is one of float32 on a CPU, in long rows."""
    num_rows = sum(chunk.num_rows for chunk in plan.chunks)
    is_long = buffer.numel() >= num_rows * _LEAST_MEAN_ROW_NUMEL
    return buffer.device.type == "cpu" and buffer.dtype is torch.float32 and is_long


class RowCodec:
    """A Codec of float32 numbers on a CPU."""

    def __init__(self, plan: QuantizePlan, dtype: torch.dtype) -> None:
        self._plan = plan
        self._dtype = dtype
        longest = max((run.row_numel for chunk in plan.chunks for run in chunk.runs), default=0)
        self._plain = torch.empty(longest)  # 1D, room for a row
        self._rounder = torch.tensor([_ROUNDER])

    def quantize(
        self, values: torch.Tensor, messages: torch.Tensor, chunks: list[int], *, keeps_error: bool
    ) -> None:
        """Write the chunks into messages."""
        for place, which in enumerate(chunks):
            chunk = self._plan.chunks[which]
            codes, scales = open_message(self._plan, messages, place, which, self._dtype)
            part = values.narrow(0, chunk.start, chunk.numel)
            written: list[float] = []
            for row, row_codes in _rows(chunk, [part, codes]):
                written.append(self._encode(row, row_codes))
                if keeps_error:
                    _subtract(row, self._encoded(row_codes), written[-1])
            scales.copy_(torch.tensor(written))

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        """Add the messages to the own chunk and write the mean."""
        chunk = self._plan.chunks[own.chunk]
        codes, scales = open_message(self._plan, own.message, 0, own.chunk, self._dtype)
        opened = open_received(self._plan, received, own.chunk, self._dtype)
        num_peers = len(opened)
        by_row = zip(*(peer_scales.tolist() for _, peer_scales in opened), strict=True)
        parts = [tensor.narrow(0, chunk.start, chunk.numel) for tensor in (values, own.out)]
        written: list[float] = []
        rows = _rows(chunk, [*parts, codes, *(peer_codes for peer_codes, _ in opened)])
        for (row, out, row_codes, *peer_codes), peer_scales in zip(rows, by_row, strict=True):
            self._add_peers(row, peer_codes, peer_scales)
            scale = self._encode(row, row_codes)
            plain = self._encoded(row_codes)
            if keeps_error:
                _subtract(row, plain, scale)
            # The codes of a mean are those of its sum: only the scales are divided.
            written.append(scale / (num_peers + 1))
            torch.mul(plain, written[-1], out=out)
        scales.copy_(torch.tensor(written))

    def add_up(self, values: torch.Tensor, received: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
        """Write the unrounded mean."""
        own = self._plan.chunks[chunk]
        opened = open_received(self._plan, received, chunk, self._dtype)
        by_row = zip(*(scales.tolist() for _, scales in opened), strict=True)
        parts = [tensor.narrow(0, own.start, own.numel) for tensor in (values, out)]
        rows = _rows(own, [*parts, *(codes for codes, _ in opened)])
        for (row, row_out, *codes), scales in zip(rows, by_row, strict=True):
            self._add_peers(row, codes, scales)
            torch.div(row, len(opened) + 1, out=row_out)

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        """Write the messages into the bucket."""
        for which in chunks:
            chunk = self._plan.chunks[which]
            codes, scales = open_message(self._plan, messages, which, which, self._dtype)
            part = out.narrow(0, chunk.start, chunk.numel)
            for (row, row_codes), scale in zip(_rows(chunk, [part, codes]), scales.tolist(), strict=True):
                # Through `row` itself: a product that meets cold memory only when it is written is slower.
                row.copy_(row_codes).mul_(scale)

    def _add_peers(self, row: torch.Tensor, codes: Sequence[torch.Tensor], scales: Sequence[float]) -> None:
        plain = self._plain[: len(row)]
        for theirs, scale in zip(codes, scales, strict=True):
            row.add_(plain.copy_(theirs), alpha=scale)

    def _encode(self, row: torch.Tensor, codes: torch.Tensor) -> float:
        """Write the codes of a row; its scale."""
        # A NaN is both the largest and the smallest, and stays in all of these.
        largest = max(-row.amin().item(), row.amax().item())
        scale = max(largest, TINY) / LIMITS[self._dtype]
        plain = self._plain[: len(row)]
        if self._dtype is torch.int8:
            torch.add(self._rounder, row, alpha=1 / scale, out=plain)
            codes.copy_(plain.view(torch.int32))
        else:
            codes.copy_(torch.mul(row, 1 / scale, out=plain))
        return scale

    def _encoded(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes of the row that was encoded last, as float32. May be asked once a row."""
        plain = self._plain[: len(codes)]
        return plain.sub_(_ROUNDER) if self._dtype is torch.int8 else plain.copy_(codes)


def _subtract(row: torch.Tensor, plain: torch.Tensor, scale: float) -> None:
    """Leave in a row what its codes fail to say."""
    if math.isfinite(scale):
        row.sub_(plain, alpha=scale)
    else:
        # An infinite gradient is skipped by whoever scales losses; its error must not stay.
        row.zero_()


def _rows(chunk: Chunk, flats: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Walk through a chunk: each tensor's part of a row."""
    for run in chunk.runs:
        yield from zip(
            *(flat.narrow(0, run.start, run.numel).split(run.row_numel) for flat in flats), strict=True
        )
