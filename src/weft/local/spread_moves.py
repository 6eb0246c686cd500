"""Shards into wholes and back between the ranks of a host, with no buffer in between.

all_gather: each rank exposes its shard, and reads every peer's straight into the
places of its pieces. reduce_scatter: each rank tells where its tensors lie, and reads
its own pieces of every rank's tensors, a chunk at a time, which stays in the core's
cache. Ranks are folded in rank order, so that bits don't depend on who folds. Small
tensors are packed by their rank first.

Only for groups whose ranks may read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.local.arithmetic import REDUCE_NUMBER, Fold
from weft.local.calls import Op
from weft.local.kernel import OWN_MEMORY, RemoteMemory, Spans
from weft.local.meeting import Call, Meeting
from weft.local.memory import CpuMemory, is_pinned, tensor_at
from weft.local.reduce import Reductions
from weft.local.spread_plan import (
    Chunk,
    Offsets,
    chunks_of_shard,
    is_packed,
    packing_batches,
    spans_in_whole,
)
from weft.local.windows import RemoteWindow, TensorWindow
from weft.tensors.spread import Spread

Given = Sequence[torch.Tensor | None]
# Of a shard, folded at a time: 256 KB to 1 MB did equally well for the memory, and fewer cost less.
_CHUNK_BYTES = 512 * 1024


class Spreading:
    """The spread collectives of one group, on the CPU."""

    def __init__(self, meeting: Meeting, memory: CpuMemory, reductions: Reductions) -> None:
        self._meeting = meeting
        self._memory = memory
        self._reductions = reductions

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, spread: Spread, timeout_secs: float
    ) -> None:
        """Read every rank's shard into the whole."""
        rank, size = self._meeting.rank, self._meeting.size
        call = Call(Op.ALL_GATHER_SPREAD, shard.dtype, shard.numel())
        with self._meeting.meet(call, self._memory, shard, timeout_secs) as round_:
            for peer in [*range(rank, size), *range(rank)]:  # not all ranks at one rank's memory
                spans = spans_in_whole(spread, peer, shard.element_size(), whole.data_ptr())
                if peer == rank:
                    OWN_MEMORY.read_into_spans(spans, shard.data_ptr())
                    continue
                window = round_.window(peer, shard.dtype, shard.numel())
                assert isinstance(window, TensorWindow | RemoteWindow)
                window.read_into_spans(spans)

    def reduce_scatter(
        self, out: torch.Tensor, tensors: Given, spread: Spread, fold: Fold, timeout_secs: float
    ) -> None:
        """Fold this rank's pieces of every rank's tensors into `out`."""
        if is_packed(spread, out.element_size()):
            rows = self._memory.scratch.get("rows", out.dtype, spread.num_ranks * spread.shard_numel)
            _pack(tensors, spread, rows)
            return self._reductions.reduce_scatter(out, rows, fold, 1.0, timeout_secs)
        given = _without_pinned(tensors)
        try:
            return self._reduce_in_place(out, given, spread, fold, timeout_secs)
        except BaseException:
            for tensor in given:  # peers may be reading them: see Meeting.abandon
                self._meeting.abandon(tensor, None, str)
            raise

    def _reduce_in_place(
        self, out: torch.Tensor, tensors: Given, spread: Spread, fold: Fold, timeout_secs: float
    ) -> None:
        meeting, memory = self._meeting, self._memory
        table = torch.from_numpy(_addresses(tensors).view(np.int64))
        numel = spread.num_ranks * spread.shard_numel
        call = Call(Op.REDUCE_SCATTER_SPREAD, out.dtype, numel, REDUCE_NUMBER[fold.name], may_inline=False)
        chunks = chunks_of_shard(spread, meeting.rank, out.element_size(), _CHUNK_BYTES)
        with meeting.meet(call, memory, table, timeout_secs) as round_:
            sources: list[_Source] = []
            for peer in range(meeting.size):
                theirs = table
                if peer != meeting.rank:
                    theirs = torch.empty_like(table)
                    round_.window(peer, torch.int64, len(table)).read_into(0, len(table), theirs)
                sources.append(_Source(memory.reach(peer), theirs.numpy().view(np.uint64)))
            for chunk in chunks:
                self._fold_chunk(chunk, sources, fold, out[chunk.start : chunk.end])

    def _fold_chunk(self, chunk: Chunk, sources: Sequence[_Source], fold: Fold, out: torch.Tensor) -> None:
        get, numel = self._memory.scratch.get, out.numel()
        first, *others = sources
        kept, part = get("kept", out.dtype, numel), get("read", out.dtype, numel)
        if fold.wide_dtype is out.dtype:
            so_far = first.read(chunk, kept)
            for source in others:
                target = out if source is others[-1] else kept
                so_far = fold.combine(so_far, source.read(chunk, part), out=target)
            fold.finish(out)
            return
        total = get("total", fold.wide_dtype, numel)
        fold.start(first.read(chunk, kept), 1.0, total)
        for source in others:
            fold.add(total, source.read(chunk, part), 1.0)
        fold.finish(total)
        out.copy_(total)


class _Source:
    """One rank's tensors."""

    __slots__ = ("_addresses", "_by_tensor", "_memory")

    def __init__(self, memory: RemoteMemory, addresses: Offsets) -> None:
        self._memory = memory
        self._addresses = addresses  # by tensor; 0 where the rank has none
        self._by_tensor: list[int] = addresses.tolist()

    def read(self, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor:
        """The rank's elements of the chunk: where they lie, if that is possible, else in the buffer."""
        if chunk.stretch is None:
            return self._collect(chunk, buffer)
        tensor, offset, num_bytes = chunk.stretch
        address = self._by_tensor[tensor]
        if not address:
            return buffer.zero_()
        if self._memory is OWN_MEMORY:
            return tensor_at(address + offset, num_bytes).view(buffer.dtype)
        self._memory.read(buffer.data_ptr(), address + offset, num_bytes)
        return buffer

    def _collect(self, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor:
        starts = self._addresses[chunk.tensors]
        there = _spans(starts + chunk.offsets, chunk.lengths)
        here = _spans(chunk.places + np.uint64(buffer.data_ptr()), chunk.lengths)
        is_there = starts != 0
        if chunk.has_padding or not is_there.all():
            buffer.zero_()
            here, there = here[is_there], there[is_there]
        self._memory.read_spans(here, there)
        return buffer


def _pack(tensors: Given, spread: Spread, rows: torch.Tensor) -> None:
    """Copy the tensors' pieces into one row a rank, zeros for padding and for those that are missing."""
    itemsize = rows.element_size()
    addresses = _addresses(tensors)
    if not addresses.all() or sum(spread.numels) < rows.numel():
        rows.zero_()
    for batch in packing_batches(spread, itemsize):
        starts = addresses[batch.tensors]
        there = _spans(starts, batch.lengths)
        here = _spans(batch.places + np.uint64(rows.data_ptr()), batch.part_lengths)
        is_there = starts != 0
        if not is_there.all():
            here, there = here[is_there[batch.owners]], there[is_there]
        OWN_MEMORY.read_spans(here, there)


def _without_pinned(tensors: Given) -> Given:
    """The tensors, copied where the kernel would refuse to let others read them."""
    if not torch.cuda.is_initialized():
        return tensors
    return [None if tensor is None else tensor.clone() if is_pinned(tensor) else tensor for tensor in tensors]


def _addresses(tensors: Given) -> Offsets:
    """Where the tensors lie; 0 for none."""
    try:
        return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))  # type: ignore[arg-type]
    except TypeError:  # one is None; asking each beforehand would take as long as this
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        return np.fromiter(pointers, np.uint64, len(tensors))


def _spans(addresses: Offsets, lengths: Offsets) -> Spans:
    return np.stack((addresses, lengths), axis=1)
