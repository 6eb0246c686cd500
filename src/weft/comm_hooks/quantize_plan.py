"""Where a bucket's numbers, codes and scales lie when it travels quantized. Pure: sizes in, plan out.

A bucket is cut into one chunk a rank, the one it adds up: at aligned places, or into the equal parts of
a sharded module's ranks. A chunk is cut into rows that
have a scale each: blocks of a fixed size, or pieces of one gradient.
In a message the codes of a chunk (a byte each) come first and its scales (float32)
after them; all messages of a bucket have the same size.

Invariant: every rank computes the same plan from the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

# Messages begin at multiples of it, so that scales lie where float32 may, and chunks for wide loads.
ALIGNMENT = 16
SCALE_BYTES = 4
# Of a gradient's rows. Longer ones would save no bytes to speak of, and cost precision; shorter ones
# cost a CPU more calls, and longer ones its cache and a GPU's parallelism.
MOST_ROW_NUMEL = 1 << 14
MOST_CPU_ROW_NUMEL = 1 << 16


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one length, one behind the other."""

    start: int  # in the chunk
    first_row: int  # in the chunk
    num_rows: int
    row_numel: int

    @property
    def numel(self) -> int:
        """How many numbers they hold."""
        return self.num_rows * self.row_numel


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a bucket that one rank adds up."""

    start: int  # in the bucket
    numel: int
    runs: tuple[Run, ...]

    @property
    def num_rows(self) -> int:
        """How many scales it has."""
        return sum(run.num_rows for run in self.runs)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """A bucket's chunks, and what a message looks like."""

    chunks: tuple[Chunk, ...]  # one a rank
    scales_start: int  # in a message, in bytes
    message_bytes: int


@lru_cache(maxsize=256)
def plan_blocks(
    numel: int, group_size: int, block_numel: int, starts: tuple[int, ...] = (), *, in_parts: bool = False
) -> QuantizePlan:
    """A scale for every `block_numel` numbers of a chunk. No block holds numbers of two gradients.

    `in_parts`: the chunks are the bucket's equal parts.
    """
    return _plan(_spans(numel, group_size, in_parts=in_parts), starts, block_numel)


@lru_cache(maxsize=256)
def plan_gradients(
    numel: int, group_size: int, starts: tuple[int, ...], *, is_cpu: bool = False, in_parts: bool = False
) -> QuantizePlan:
    """A scale for every gradient, large ones in pieces; `starts` says where gradients begin in the bucket."""
    most_numel = MOST_CPU_ROW_NUMEL if is_cpu else MOST_ROW_NUMEL
    return _plan(_spans(numel, group_size, in_parts=in_parts), starts, most_numel)


def _plan(spans: list[tuple[int, int]], cuts: tuple[int, ...], row_numel: int) -> QuantizePlan:
    chunks = tuple(Chunk(start, stop - start, _runs(start, stop, cuts, row_numel)) for start, stop in spans)
    scales_start = _aligned(max(chunk.numel for chunk in chunks))
    most_rows = max(chunk.num_rows for chunk in chunks)
    return QuantizePlan(chunks, scales_start, _aligned(scales_start + SCALE_BYTES * most_rows))


def _runs(start: int, stop: int, cuts: tuple[int, ...], row_numel: int) -> tuple[Run, ...]:
    """Rows of at most `row_numel` that no cut goes through."""
    edges = [start, *sorted({cut for cut in cuts if start < cut < stop}), stop]
    runs: list[Run] = []
    first_row = 0
    for begin, end in pairwise(edges):
        num_rows, rest = divmod(end - begin, row_numel)
        for count, length in ((num_rows, row_numel), (1, rest)):
            if count and length:
                runs.append(Run(begin - start, first_row, count, length))
                begin += count * length
                first_row += count
    return tuple(runs)


def _spans(numel: int, group_size: int, *, in_parts: bool) -> list[tuple[int, int]]:
    """Where each rank's chunk begins and ends; the last ones of a small bucket are empty."""
    length = -(-numel // group_size)
    length = length if in_parts else _aligned(length)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(group_size)]


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
