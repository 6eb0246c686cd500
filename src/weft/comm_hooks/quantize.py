"""Quantize, add up and restore a bucket's chunks with plain torch: the reference, and the CPU's way.

A row of numbers becomes one byte each and a scale, scale = absmax / limit: code =
round(x / scale), x ~ code * scale. The error of a number is at most half a scale
(of an int8 code; of an fp8 one a sixteenth of the number). A row of zeros stays
exactly zero. A row with a NaN or an infinity has a scale that is not finite, and none
of its numbers comes out finite: what has gone wrong is seen, never turned into numbers.

Everything is done block by block, so that on a CPU what one operation wrote is still
in the cache for the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.comm_hooks.quantize_plan import SCALE_BYTES, Chunk, QuantizePlan

# The largest code of each dtype that numbers may travel in.
LIMITS: dict[torch.dtype, float] = {torch.int8: 127.0}
if hasattr(torch, "float8_e4m3fn"):
    LIMITS[torch.float8_e4m3fn] = 448.0

# Rows of less have the scale of this: an inverse must not overflow float32.
TINY = 2.0**-100
_CPU_BLOCK_NUMEL = 1 << 17


class Codec(Protocol):
    """How the numbers of a bucket become messages and messages numbers."""

    def quantize(
        self, values: torch.Tensor, messages: torch.Tensor, chunks: list[int], *, keeps_error: bool
    ) -> None:
        """Write the chunks of the bucket `values` into messages, one behind the other.

        With `keeps_error` the values become what the messages fail to say.
        """
        ...

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        """Add everyone's message to the own chunk of `values`, and write the mean into the own message.

        What the message says is written into the own chunk of the bucket, too. With `keeps_error`, for
        which values must be float32, their own chunk becomes what the message fails to say of the sum.
        """
        ...

    def add_up(self, values: torch.Tensor, received: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
        """Write the mean of the own chunk of `values` and everyone's messages into the bucket, unrounded.

        The own chunk of `values` holds anything after it.
        """
        ...

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        """Write the messages of these ranks, out of everyone's, into the bucket."""
        ...


@dataclass(frozen=True, slots=True)
class Own:
    """What a rank makes of its chunk."""

    chunk: int
    message: torch.Tensor
    out: torch.Tensor  # the bucket


class TorchCodec:
    """A Codec of torch operations."""

    def __init__(self, plan: QuantizePlan, dtype: torch.dtype) -> None:
        self._plan = plan
        self._dtype = dtype

    def quantize(
        self, values: torch.Tensor, messages: torch.Tensor, chunks: list[int], *, keeps_error: bool
    ) -> None:
        """Write the chunks into messages."""
        for place, which in enumerate(chunks):
            chunk = self._plan.chunks[which]
            codes, scales = open_message(self._plan, messages, place, which, self._dtype)
            part = values.narrow(0, chunk.start, chunk.numel)
            for (workspace, _), (block, block_codes), (block_scales,) in _blocks(
                chunk, [part, codes], [scales]
            ):
                encode(block, block_codes, block_scales, workspace, keeps_error=keeps_error)

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        """Add the messages to the own chunk and write the mean."""
        chunk = self._plan.chunks[own.chunk]
        codes, scales = open_message(self._plan, own.message, 0, own.chunk, self._dtype)
        opened = open_received(self._plan, received, own.chunk, self._dtype)
        num_peers = len(opened)
        parts = [tensor.narrow(0, chunk.start, chunk.numel) for tensor in (values, own.out)]
        flats = [*parts, codes, *(peer_codes for peer_codes, _ in opened)]
        by_row = [scales, *(peer_scales for _, peer_scales in opened)]
        for (workspace, total), blocks, block_scales in _blocks(chunk, flats, by_row):
            block, out, block_codes, *peer_codes = blocks
            _sum_into(total, block, workspace, peer_codes, block_scales[1:])
            encode(total, block_codes, block_scales[0], workspace, keeps_error=keeps_error)
            if keeps_error:
                block.copy_(total)
            # The codes of a mean are those of its sum: only the scales are divided.
            torch.mul(workspace, block_scales[0].div_(num_peers + 1), out=out)

    def add_up(self, values: torch.Tensor, received: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
        """Write the unrounded mean."""
        own = self._plan.chunks[chunk]
        opened = open_received(self._plan, received, chunk, self._dtype)
        parts = [tensor.narrow(0, own.start, own.numel) for tensor in (values, out)]
        flats = [*parts, *(codes for codes, _ in opened)]
        for (workspace, total), blocks, scales in _blocks(own, flats, [scales for _, scales in opened]):
            block, block_out, *peer_codes = blocks
            _sum_into(total, block, workspace, peer_codes, scales)
            torch.div(total, len(opened) + 1, out=block_out)

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        """Write the messages into the bucket."""
        for which in chunks:
            chunk = self._plan.chunks[which]
            codes, scales = open_message(self._plan, messages, which, which, self._dtype)
            part = out.narrow(0, chunk.start, chunk.numel)
            for (workspace, _), (block, block_codes), (block_scales,) in _blocks(
                chunk, [part, codes], [scales]
            ):
                plain = block if out.dtype is torch.float32 else workspace
                torch.mul(plain.copy_(block_codes), block_scales, out=block)


def open_message(
    plan: QuantizePlan, messages: torch.Tensor, place: int, which: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales of a chunk, in the message at this place."""
    chunk = plan.chunks[which]
    start = place * plan.message_bytes
    codes = messages.narrow(0, start, chunk.numel).view(dtype)
    scale_bytes = messages.narrow(0, start + plan.scales_start, SCALE_BYTES * chunk.num_rows)
    return codes, scale_bytes.view(torch.float32)


def open_received(
    plan: QuantizePlan, received: torch.Tensor, which: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The codes and the scales of one chunk as each peer sent it."""
    num_peers = received.numel() // plan.message_bytes
    return [open_message(plan, received, place, which, dtype) for place in range(num_peers)]


def encode(
    rows: torch.Tensor,  # 2D
    codes: torch.Tensor,  # 2D
    scales: torch.Tensor,  # 2D, of one column
    workspace: torch.Tensor,  # 2D, float32
    *,
    keeps_error: bool,
) -> None:
    """Write the codes of some rows, also as float32 into the workspace, and the scales.

    With `keeps_error` leave the error in `rows`.
    """
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()).float()
    # A NaN stays one in all of these. Zeros have codes of zero, whatever their scale.
    torch.div(largest.clamp_min_(TINY), LIMITS[codes.dtype], out=scales)
    torch.mul(rows, scales.reciprocal(), out=workspace)
    if codes.dtype is torch.int8:
        codes.copy_(workspace.round_())
    else:
        workspace.copy_(codes.copy_(workspace))
    if keeps_error:
        # An infinite gradient is skipped by whoever scales losses; its error must not stay.
        torch.nan_to_num_(rows.addcmul_(workspace, scales, value=-1), 0.0, 0.0, 0.0)


def _sum_into(
    total: torch.Tensor,
    own: torch.Tensor,
    workspace: torch.Tensor,
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> None:
    """The own block and what each peer's codes and scales say, in float32."""
    before = own
    for theirs, their_scales in zip(codes, scales, strict=True):
        before = torch.addcmul(before, workspace.copy_(theirs), their_scales, out=total)


Pair = tuple[torch.Tensor, torch.Tensor]
Block = tuple[Pair, Sequence[torch.Tensor], Sequence[torch.Tensor]]


def _blocks(chunk: Chunk, flats: Sequence[torch.Tensor], by_row: Sequence[torch.Tensor]) -> Iterator[Block]:
    """Walk through a chunk: room for two blocks in float32, the block of each tensor, its rows' scales."""
    is_cpu = flats[0].device.type == "cpu"
    for run in chunk.runs:
        num_together = max(1, _CPU_BLOCK_NUMEL // run.row_numel) if is_cpu else run.num_rows
        shape = (run.num_rows, run.row_numel)
        blocks = [flat.narrow(0, run.start, run.numel).view(shape).split(num_together) for flat in flats]
        scales = [
            rows.narrow(0, run.first_row, run.num_rows).unsqueeze(1).split(num_together) for rows in by_row
        ]
        rooms = torch.empty((2, *blocks[0][0].shape), dtype=torch.float32, device=flats[0].device)
        for block, block_scales in zip(zip(*blocks, strict=True), zip(*scales, strict=True), strict=True):
            num_rows = len(block[0])
            yield (rooms[0, :num_rows], rooms[1, :num_rows]), block, block_scales
