"""Quantize, add up and restore a bucket's chunks on a GPU: one Triton kernel each.

The numbers are those of quantize.py, which says what codes and scales are. A program holds whole rows
in its registers, so every number is read once and written once. Rows that fill a program's tile and
lie at aligned places come first and need no mask: only then are loads and stores wide. Imported
only where there is Triton and a CUDA tensor.
"""

# Kernels are Triton's language, not Python: pyright knows none of its types.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalSubscript=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weft.comm_hooks.quantize import LIMITS, TINY, Own
from weft.comm_hooks.quantize_plan import ALIGNMENT, MOST_ROW_NUMEL, SCALE_BYTES, QuantizePlan

_NUM_COLUMNS = 4  # of a row's entry in a table: where its numbers, codes and scale begin, and its length
_PROGRAM_NUMEL = 4096  # short rows share a program
_NUMEL_PER_WARP = 1024
_VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FP8_CAPABILITY = (8, 9)

Entry = tuple[int, int, int, int]


def is_usable(plan: QuantizePlan, buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels know the buffer's dtype and hold its rows, and the GPU knows the codes' dtype."""
    is_fp8_there = torch.cuda.get_device_capability(buffer.device) >= _FP8_CAPABILITY
    longest = max((run.row_numel for chunk in plan.chunks for run in chunk.runs), default=0)
    return (
        buffer.dtype in _VALUE_DTYPES and longest <= MOST_ROW_NUMEL and (dtype is torch.int8 or is_fp8_there)
    )


class TritonCodec:
    """A Codec of one kernel a call."""

    def __init__(self, plan: QuantizePlan, dtype: torch.dtype) -> None:
        self._plan = plan
        self._dtype = dtype

    def quantize(
        self, values: torch.Tensor, messages: torch.Tensor, chunks: list[int], *, keeps_error: bool
    ) -> None:
        """Write the chunks into messages."""
        table = _table(self._plan, tuple((which, place) for place, which in enumerate(chunks)), values.device)
        codes, scales = self._open(messages)
        options = {"limit": LIMITS[self._dtype], "TINY": TINY, "KEEPS_ERROR": keeps_error}
        table.launch(_quantize, values, codes, scales, **options)

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        """Add the messages to the own chunk and write the mean."""
        table = _table(self._plan, ((own.chunk, 0),), values.device)
        codes, scales = self._open(own.message)
        peer_codes, peer_scales = self._open(received)
        num_peers = received.numel() // self._plan.message_bytes
        table.launch(
            _fold,
            values,
            codes,
            scales,
            out=own.out,
            peer_codes=peer_codes,
            peer_scales=peer_scales,
            num_peers=num_peers,
            group_size=float(num_peers + 1),
            message_bytes=self._plan.message_bytes,
            limit=LIMITS[self._dtype],
            TINY=TINY,
            KEEPS_ERROR=keeps_error,
        )

    def add_up(self, values: torch.Tensor, received: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
        """Write the unrounded mean."""
        table = _table(self._plan, ((chunk, 0),), values.device)
        num_peers = received.numel() // self._plan.message_bytes
        table.launch(
            _add_up,
            values,
            *self._open(received),
            out=out,
            num_peers=num_peers,
            group_size=float(num_peers + 1),
            message_bytes=self._plan.message_bytes,
        )

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        """Write the messages into the bucket."""
        table = _table(self._plan, tuple((which, which) for which in chunks), out.device)
        codes, scales = self._open(messages)
        table.launch(_restore, out, codes, scales)

    def _open(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return messages.view(self._dtype), messages.view(torch.float32)


class _Table:
    """Where the rows of some chunks are, on the device, and how they are shared out to programs."""

    def __init__(self, entries: list[Entry], device: torch.device) -> None:
        longest = max((numel for *_, numel in entries), default=1)
        self._tile_numel = triton.next_power_of_2(longest)
        self._num_rows = max(1, _PROGRAM_NUMEL // self._tile_numel)  # of a program
        wide = [entry for entry in entries if _is_wide(entry, self._tile_numel)]
        num_wide = len(wide) // self._num_rows * self._num_rows
        others = wide[num_wide:] + [entry for entry in entries if not _is_wide(entry, self._tile_numel)]
        others += [(0, 0, 0, 0)] * (-len(others) % self._num_rows)  # rows of nothing: programs are full
        self._parts = [
            (is_wide, torch.tensor(part, dtype=torch.int64).view(-1, _NUM_COLUMNS).to(device))
            for is_wide, part in ((True, wide[:num_wide]), (False, others))
            if part
        ]

    def launch(
        self, kernel: Any, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, **options: Any
    ) -> None:
        """Run the kernel on all rows."""
        num_warps = min(16, max(1, self._num_rows * self._tile_numel // _NUMEL_PER_WARP))
        shape = {"ROWS": self._num_rows, "TILE": self._tile_numel, "num_warps": num_warps}
        for is_wide, entries in self._parts:
            grid = (len(entries) // self._num_rows,)
            kernel[grid](values, codes, scales, entries, **options, **shape, WIDE=is_wide)


def _is_wide(entry: Entry, tile_numel: int) -> bool:
    start, code, _, numel = entry
    return numel == tile_numel and start % ALIGNMENT == 0 and code % ALIGNMENT == 0


@lru_cache(maxsize=256)
def _table(plan: QuantizePlan, places: tuple[tuple[int, int], ...], device: torch.device) -> _Table:
    """The rows of chunks, each with its message's place. A bucket has the same ones in every step."""
    entries: list[Entry] = []
    for which, place in places:
        chunk = plan.chunks[which]
        code_base = place * plan.message_bytes
        scale_base = (code_base + plan.scales_start) // SCALE_BYTES
        for run in chunk.runs:
            for row in range(run.num_rows):
                start = run.start + row * run.row_numel
                scale = scale_base + run.first_row + row
                entries.append((chunk.start + start, code_base + start, scale, run.row_numel))
    return _Table(entries, device)


@triton.jit
def _open_rows(entries, ROWS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    # Places of numbers and of codes (2D), of scales (1D), and which of both are there.
    entry = entries + (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * 4
    starts = tl.load(entry)
    code_starts = tl.load(entry + 1)
    if WIDE:
        starts = tl.multiple_of(starts, 16)
        code_starts = tl.multiple_of(code_starts, 16)
    numel = tl.load(entry + 3)
    lanes = tl.arange(0, TILE)[None, :]
    inside = lanes < numel[:, None]
    return starts[:, None] + lanes, code_starts[:, None] + lanes, tl.load(entry + 2), inside, numel > 0


@triton.jit
def _load(pointers, inside, WIDE: tl.constexpr):
    if WIDE:
        numbers = tl.load(pointers)
    else:
        numbers = tl.load(pointers, mask=inside, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _store(pointers, numbers, inside, WIDE: tl.constexpr):
    if WIDE:
        tl.store(pointers, numbers.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, numbers.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _scales_and_factors(x, limit, TINY: tl.constexpr):
    # A maximum may pass over a NaN, but not over an infinity.
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    largest = tl.maximum(tl.max(magnitude, axis=1), TINY)
    # Divisions as IEEE has them: these are what torch computes, to the bit.
    scale = tl.div_rn(largest, tl.zeros_like(largest) + limit)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _encode(x, factor, codes):
    scaled = x * factor[:, None]
    if codes.dtype.element_ty == tl.int8:
        code = libdevice.rint(scaled).to(tl.int8)
    else:
        code = scaled.to(codes.dtype.element_ty)
    return code


@triton.jit
def _errors(x, code, scale):
    error = x - code.to(tl.float32) * scale[:, None]
    # An infinite gradient is skipped by whoever scales losses; its error must not stay.
    return tl.where(tl.abs(error) < float("inf"), error, 0.0)


@triton.jit
def _quantize(
    values,
    codes,
    scales,
    entries,
    limit,
    TINY: tl.constexpr,
    KEEPS_ERROR: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    at, code_at, scale_at, inside, is_row = _open_rows(entries, ROWS, TILE, WIDE)
    x = _load(values + at, inside, WIDE)
    scale, factor = _scales_and_factors(x, limit, TINY)
    code = _encode(x, factor, codes)
    _store(codes + code_at, code, inside, WIDE)
    _store(scales + scale_at, scale, is_row, WIDE)
    if KEEPS_ERROR:
        _store(values + at, _errors(x, code, scale), inside, WIDE)


@triton.jit
def _add_peers(
    total, codes, scales, code_at, scale_at, inside, is_row, num_peers, message_bytes, WIDE: tl.constexpr
):
    for peer in range(num_peers):
        # In 64 bits: the messages may be more than 2 GB together.
        message = tl.multiple_of(peer.to(tl.int64) * message_bytes, 16)
        code = _load(codes + (message + code_at), inside, WIDE)
        total += code * _load(scales + (message // 4 + scale_at), is_row, WIDE)[:, None]
    return total


@triton.jit
def _fold(
    values,
    codes,
    scales,
    entries,
    out,
    peer_codes,
    peer_scales,
    num_peers,
    group_size,
    message_bytes,
    limit,
    TINY: tl.constexpr,
    KEEPS_ERROR: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    at, code_at, scale_at, inside, is_row = _open_rows(entries, ROWS, TILE, WIDE)
    total = _load(values + at, inside, WIDE)
    total = _add_peers(
        total, peer_codes, peer_scales, code_at, scale_at, inside, is_row, num_peers, message_bytes, WIDE
    )
    scale, factor = _scales_and_factors(total, limit, TINY)
    code = _encode(total, factor, codes)
    _store(codes + code_at, code, inside, WIDE)
    # The codes of a mean are those of its sum: only the scale is divided.
    mean_scale = tl.div_rn(scale, tl.zeros_like(scale) + group_size)
    _store(scales + scale_at, mean_scale, is_row, WIDE)
    if KEEPS_ERROR:
        _store(values + at, _errors(total, code, scale), inside, WIDE)
    _store(out + at, code.to(tl.float32) * mean_scale[:, None], inside, WIDE)


@triton.jit
def _add_up(
    values,
    codes,
    scales,
    entries,
    out,
    num_peers,
    group_size,
    message_bytes,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    at, code_at, scale_at, inside, is_row = _open_rows(entries, ROWS, TILE, WIDE)
    total = _load(values + at, inside, WIDE)
    total = _add_peers(
        total, codes, scales, code_at, scale_at, inside, is_row, num_peers, message_bytes, WIDE
    )
    _store(out + at, tl.div_rn(total, tl.zeros_like(total) + group_size), inside, WIDE)


@triton.jit
def _restore(out, codes, scales, entries, ROWS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    at, code_at, scale_at, inside, is_row = _open_rows(entries, ROWS, TILE, WIDE)
    code = _load(codes + code_at, inside, WIDE)
    _store(out + at, code * _load(scales + scale_at, is_row, WIDE)[:, None], inside, WIDE)
