"""A bucket's numbers in a narrower dtype, and back.

On a CPU the narrow numbers lie in the first part of the bucket's own memory: memory that is
written anew costs more there than the conversion. Blocks are narrowed from the first to the
last and widened from the last to the first, so none is overwritten before it is read.
"""

from __future__ import annotations

import torch

# A block and what is made of it stay in a core's cache.
_BLOCK_NUMEL = 1 << 16


def narrow_quotients(buffer: torch.Tensor, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers over the divisor, in a narrower dtype. The buffer is void until `widen`."""
    # Divided in the wide dtype: it is rounded once, and a mean may fit into 16 bits where a number doesn't.
    if not _is_in_place(buffer):
        return torch.div(buffer, divisor).to(dtype)
    flat = buffer.view(-1)
    narrowed = flat.view(dtype)[: flat.numel()]
    room = torch.empty(min(_BLOCK_NUMEL, flat.numel()), dtype=buffer.dtype)
    for block, out in zip(flat.split(_BLOCK_NUMEL), narrowed.split(_BLOCK_NUMEL), strict=True):
        out.copy_(torch.div(block, divisor, out=room[: len(block)]))
    return narrowed


def widen(narrowed: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Write the narrow numbers into the buffer; `narrowed` is void if it was there."""
    if narrowed.data_ptr() != buffer.data_ptr():
        return buffer.copy_(narrowed)
    flat = buffer.view(-1)
    room = torch.empty(min(_BLOCK_NUMEL, flat.numel()), dtype=narrowed.dtype)
    pairs = zip(flat.split(_BLOCK_NUMEL), narrowed.split(_BLOCK_NUMEL), strict=True)
    for block, theirs in reversed(list(pairs)):
        block.copy_(room[: len(block)].copy_(theirs))
    return buffer


def _is_in_place(buffer: torch.Tensor) -> bool:
    is_plain = buffer.is_contiguous() and not torch.compiler.is_compiling()
    return is_plain and buffer.device.type == "cpu" and buffer.numel() > 0
