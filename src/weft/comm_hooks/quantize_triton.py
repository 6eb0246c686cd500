"""Quantize, add up and restore a bucket's chunks on a GPU: one Triton kernel each, one program a row.

The numbers are those of quantize.py, which says what codes and scales are. Imported
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
from weft.comm_hooks.quantize_plan import ALIGNMENT, SCALE_BYTES, QuantizePlan

_MOST_TILE_NUMEL = 1024
_NUM_COLUMNS = 4  # of a row's entry in a table: where its numbers, codes and scale begin, and its length
_VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FP8_CAPABILITY = (8, 9)


def is_usable(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels know the buffer's dtype and the GPU knows that of the codes."""
    is_fp8_there = torch.cuda.get_device_capability(buffer.device) >= _FP8_CAPABILITY
    return buffer.dtype in _VALUE_DTYPES and (dtype is torch.int8 or is_fp8_there)


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
        table.launch(
            _quantize_rows,
            values,
            codes,
            scales,
            limit=LIMITS[self._dtype],
            TINY=TINY,
            KEEPS_ERROR=keeps_error,
        )

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        """Add the messages to the own chunk and write the mean."""
        table = _table(self._plan, ((own.chunk, 0),), values.device)
        codes, scales = self._open(own.message)
        peer_codes, peer_scales = self._open(received)
        # Room for the sums where they must not be rounded. Errors are float32, so this is in place.
        totals = values if values.dtype is torch.float32 else torch.empty_like(values, dtype=torch.float32)
        num_peers = received.numel() // self._plan.message_bytes
        table.launch(
            _fold_rows,
            values,
            codes,
            scales,
            totals=totals,
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

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        """Write the messages into the bucket."""
        table = _table(self._plan, tuple((which, which) for which in chunks), out.device)
        codes, scales = self._open(messages)
        table.launch(_restore_rows, out, codes, scales)

    def _open(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return messages.view(self._dtype), messages.view(torch.float32)


class _Table:
    """Where the rows of some chunks are, on the device."""

    def __init__(self, entries: list[tuple[int, int, int, int]], device: torch.device) -> None:
        self._num_rows = len(entries)
        self._entries = torch.tensor(entries, dtype=torch.int64).view(-1, _NUM_COLUMNS).to(device)
        # Known to the compiler, it makes wide loads and stores of neighbouring numbers.
        self._is_aligned = all(
            start % ALIGNMENT == 0 and code % ALIGNMENT == 0 for start, code, *_ in entries
        )
        longest = max((numel for *_, numel in entries), default=1)
        self._tile_numel = min(_MOST_TILE_NUMEL, triton.next_power_of_2(longest))

    def launch(
        self, kernel: Any, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, **options: Any
    ) -> None:
        """Run the kernel, a program a row."""
        if self._num_rows == 0:
            return
        kernel[(self._num_rows,)](
            values, codes, scales, self._entries, **options, TILE=self._tile_numel, ALIGNED=self._is_aligned
        )


@lru_cache(maxsize=256)
def _table(plan: QuantizePlan, places: tuple[tuple[int, int], ...], device: torch.device) -> _Table:
    """The rows of chunks, each with its message's place. A bucket has the same ones in every step."""
    entries: list[tuple[int, int, int, int]] = []
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
def _open_row(entries, ALIGNED: tl.constexpr):
    entry = entries + tl.program_id(0) * 4
    value_start = tl.load(entry)
    code_start = tl.load(entry + 1)
    if ALIGNED:
        value_start = tl.multiple_of(value_start, 16)
        code_start = tl.multiple_of(code_start, 16)
    return value_start, code_start, tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _scale_and_factor(largest, limit, TINY: tl.constexpr):
    # Divisions as IEEE has them: these are what torch computes, to the bit.
    scale = tl.div_rn(tl.maximum(largest, TINY), limit)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _magnitude(x):
    # A maximum may pass over a NaN, but not over an infinity.
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _encode_tile(x, factor, codes):
    scaled = x * factor
    if codes.dtype.element_ty == tl.int8:
        code = libdevice.rint(scaled).to(tl.int8)
    else:
        code = scaled.to(codes.dtype.element_ty)
    return code


@triton.jit
def _error_of(x, code, scale):
    error = x - code.to(tl.float32) * scale
    # An infinite gradient is skipped by whoever scales losses; its error must not stay.
    return tl.where(tl.abs(error) < float("inf"), error, 0.0)


@triton.jit
def _quantize_rows(
    values,
    codes,
    scales,
    entries,
    limit,
    TINY: tl.constexpr,
    KEEPS_ERROR: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    value_start, code_start, scale_at, numel = _open_row(entries, ALIGNED)
    lanes = tl.arange(0, TILE)
    largest = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, numel, TILE):
        inside = start + lanes < numel
        x = tl.load(values + value_start + start + lanes, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    scale, factor = _scale_and_factor(tl.max(largest, axis=0), limit, TINY)
    tl.store(scales + scale_at, scale)
    # A row is read again from the cache: it is 64 KB at most.
    for start in range(0, numel, TILE):
        inside = start + lanes < numel
        x = tl.load(values + value_start + start + lanes, mask=inside, other=0.0).to(tl.float32)
        code = _encode_tile(x, factor, codes)
        tl.store(codes + code_start + start + lanes, code, mask=inside)
        if KEEPS_ERROR:
            tl.store(values + value_start + start + lanes, _error_of(x, code, scale), mask=inside)


@triton.jit
def _fold_rows(
    values,
    codes,
    scales,
    entries,
    totals,
    out,
    peer_codes,
    peer_scales,
    num_peers,
    group_size,
    message_bytes,
    limit,
    TINY: tl.constexpr,
    KEEPS_ERROR: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    value_start, code_start, scale_at, numel = _open_row(entries, ALIGNED)
    lanes = tl.arange(0, TILE)
    largest = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, numel, TILE):
        inside = start + lanes < numel
        total = tl.load(values + value_start + start + lanes, mask=inside, other=0.0).to(tl.float32)
        for peer in range(num_peers):
            code_at = peer_codes + peer * message_bytes + code_start + start + lanes
            code = tl.load(code_at, mask=inside)
            total += code.to(tl.float32) * tl.load(peer_scales + peer * (message_bytes // 4) + scale_at)
        tl.store(totals + value_start + start + lanes, total, mask=inside)
        largest = tl.maximum(largest, tl.where(inside, _magnitude(total), 0.0))
    scale, factor = _scale_and_factor(tl.max(largest, axis=0), limit, TINY)
    # The codes of a mean are those of its sum: only the scale is divided.
    mean_scale = tl.div_rn(scale, group_size)
    tl.store(scales + scale_at, mean_scale)
    tl.debug_barrier()  # what other threads of the program have written is read below
    for start in range(0, numel, TILE):
        inside = start + lanes < numel
        total = tl.load(totals + value_start + start + lanes, mask=inside, other=0.0)
        code = _encode_tile(total, factor, codes)
        tl.store(codes + code_start + start + lanes, code, mask=inside)
        if KEEPS_ERROR:
            tl.store(totals + value_start + start + lanes, _error_of(total, code, scale), mask=inside)
        mean = code.to(tl.float32) * mean_scale
        tl.store(out + value_start + start + lanes, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _restore_rows(out, codes, scales, entries, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    value_start, code_start, scale_at, numel = _open_row(entries, ALIGNED)
    lanes = tl.arange(0, TILE)
    scale = tl.load(scales + scale_at)
    for start in range(0, numel, TILE):
        inside = start + lanes < numel
        code = tl.load(codes + code_start + start + lanes, mask=inside)
        number = code.to(tl.float32) * scale
        tl.store(out + value_start + start + lanes, number.to(out.dtype.element_ty), mask=inside)
