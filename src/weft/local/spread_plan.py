"""Where one rank's reads of a spread begin and end, as arrays. Pure: computed once a spread.

Offsets are in bytes, from the first byte of the tensor or buffer that they are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.local.board import INLINE_BYTES
from weft.local.kernel import MOST_SPANS, Spans
from weft.tensors.spread import Spread

Offsets = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

# Up to this size, on the average and in all, tensors are packed once by their rank, since
# reaching for each of them in another process costs more than copying it.
_SMALL_NUMEL = 4096
_SMALL_BYTES = 8 * 2**20


def is_packed(spread: Spread, itemsize: int) -> bool:
    """Whether tensors are so small that a rank packs them for the others to read."""
    numel = spread.num_ranks * spread.shard_numel
    num_bytes = numel * itemsize
    return num_bytes <= INLINE_BYTES or (
        numel <= _SMALL_NUMEL * len(spread.numels) and num_bytes <= _SMALL_BYTES
    )


# -- a shard's places in the whole ---------------------------------------------------------


def spans_in_whole(spread: Spread, rank: int, itemsize: int, address: int) -> Spans:
    """Where a rank's shard goes in a whole at this address, in order."""
    kept = spread.kept_or_made(("spans", rank, itemsize), lambda: _spans_in_whole(spread, rank, itemsize))
    spans = kept.copy()
    spans[:, 0] += np.uint64(address)
    return spans


def _spans_in_whole(spread: Spread, rank: int, itemsize: int) -> Spans:
    starts = [spread.piece_start(index, rank) for index in range(len(spread.numels))]
    spans = np.array([starts, spread.piece_numels], dtype=np.uint64).T * np.uint64(itemsize)
    return np.ascontiguousarray(spans[spans[:, 1] > 0])


# -- tensors packed as one row a rank -------------------------------------------------------


@dataclass(frozen=True)
class PackingBatch:
    """Tensors that one call packs, and where the parts of each go in the rows of all ranks."""

    tensors: Indices
    lengths: Offsets  # of these tensors
    owners: Indices  # of each part: which of these tensors it is of
    places: Offsets  # of each part, in the rows
    part_lengths: Offsets


def packing_batches(spread: Spread, itemsize: int) -> list[PackingBatch]:
    """All tensors of the spread, in batches of as many parts as one call takes."""
    return spread.kept_or_made(("batches", itemsize), lambda: list(_packing_batches(spread, itemsize)))


def _packing_batches(spread: Spread, itemsize: int) -> Iterator[PackingBatch]:
    filled = [index for index, numel in enumerate(spread.numels) if numel]
    most = max(1, MOST_SPANS // spread.num_ranks)
    for start in range(0, len(filled), most):
        indices = filled[start : start + most]
        parts = [
            (owner, rank * spread.shard_numel + spread.shard_starts[index], spread.filled_numel(index, rank))
            for owner, index in enumerate(indices)
            for rank in range(spread.num_ranks)
            if spread.filled_numel(index, rank)
        ]
        owners, places, lengths = np.array(parts, dtype=np.int64).reshape(-1, 3).T
        numels = np.array([spread.numels[index] for index in indices], dtype=np.int64)
        yield PackingBatch(
            np.array(indices, dtype=np.int64),
            _bytes(numels, itemsize),
            np.ascontiguousarray(owners),
            _bytes(places, itemsize),
            _bytes(lengths, itemsize),
        )


# -- a shard in chunks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Elements start..end of a rank's shard, and which bytes of which tensors they are."""

    start: int
    end: int
    stretch: tuple[int, int, int] | None  # tensor, offset, length; where it is this of one tensor, no more
    tensors: Indices  # without those that have nothing but padding here
    offsets: Offsets  # in these tensors
    places: Offsets  # in the chunk
    lengths: Offsets
    has_padding: bool


def chunks_of_shard(spread: Spread, rank: int, itemsize: int, chunk_bytes: int) -> list[Chunk]:
    """A rank's shard in chunks of at most this size: stretches of large tensors, small ones together."""
    most = max(1, chunk_bytes // itemsize)
    return spread.kept_or_made(
        ("chunks", rank, itemsize, most),
        lambda: [_chunk(spread, rank, itemsize, *cut) for cut in _cuts(spread, most)],
    )


def _cuts(spread: Spread, most: int) -> Iterator[tuple[range, int, int]]:
    """Neighbouring tensors, and which elements of them: from..to, counted from where the first begins.

    Only a stretch of a single tensor begins elsewhere than at 0.
    """
    first, numel = 0, 0  # of those that are collected
    for index, piece_numel in enumerate(spread.piece_numels):
        is_large = piece_numel * 4 > most
        if is_large or numel + piece_numel > most or index - first == MOST_SPANS:
            if numel:
                yield range(first, index), 0, numel
            first, numel = index, 0
        if is_large:
            for start in range(0, piece_numel, most):
                yield range(index, index + 1), start, min(start + most, piece_numel)
            first = index + 1
        else:
            numel += piece_numel
    if numel:
        yield range(first, len(spread.numels)), 0, numel


def _chunk(spread: Spread, rank: int, itemsize: int, indices: range, lo: int, hi: int) -> Chunk:
    start = spread.shard_starts[indices[0]]
    rows: list[tuple[int, int, int, int]] = []
    for index in indices:
        filled = min(spread.filled_numel(index, rank), hi) - lo
        if filled > 0:
            offset = rank * spread.piece_numels[index] + lo
            rows.append((index, offset, spread.shard_starts[index] - start, filled))
    tensors, offsets, places, lengths = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    has_padding = int(lengths.sum()) < hi - lo
    is_stretch = len(rows) == 1 and not has_padding
    return Chunk(
        start + lo,
        start + hi,
        (rows[0][0], rows[0][1] * itemsize, rows[0][3] * itemsize) if is_stretch else None,
        np.ascontiguousarray(tensors),
        _bytes(offsets, itemsize),
        _bytes(places, itemsize),
        _bytes(lengths, itemsize),
        has_padding,
    )


def _bytes(numels: Indices, itemsize: int) -> Offsets:
    return (numels * itemsize).astype(np.uint64)
