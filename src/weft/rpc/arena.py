"""Blocks of memory that one worker fills and the others of its host read in place.

A slab is one piece of memory, cut into blocks of one size, and a page with a flag for each block: 1 while it
is lent, 0 when it is free. The lender sets a flag when it fills the block; the borrower clears it when its
last tensor on the block is gone. No message is needed for that. A block that was used before is lent first,
since fresh pages cost more than the copy.

Invariant: only the lender turns 0 into 1, under its lock, and only the borrower turns 1 into 0. A block whose
borrower left is not lent again: the tensors may have outlived the worker. Its slab is retired, and the kernel
frees it with the last process that has it mapped.

A borrower that has no use for a block any more may hand it back in a message, with what it has made of it:
nothing is copied then. The lender borrows the block from itself, so that one more tensor lives on it.

Slabs are the host's memory here, and a GPU's in device_arena.py.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.errors import ConfigError, PeerError, StateError
from weft.local import kernel
from weft.local.segment import MappedSegments, Segment, SegmentName, own_segment
from weft.rpc.tensor_memory import bytes_of, copy_memory
from weft.rpc.wire import WireError
from weft.tensors import holder_count, use_count

KEPT_BYTES = 256 << 20
_SLAB_BYTES = 16 << 20
_SMALLEST_BLOCK_BYTES = 64 << 10
_MAX_BLOCKS = 256  # of a slab: its flags fit the first page with room for more
_MAX_SLABS = 128  # each takes two file descriptors, and a process has about a thousand
_TRIM_SECS = 1.0
LENT, FREE = 1, 0
_GONE = -1  # in the place of a borrower that left
_OWN = -2  # of one that handed the block back: the lender has it

_BYTE = np.dtype(np.uint8)

Block = np.ndarray[Any, Any]
Form = tuple[Sequence[int], np.dtype[Any]]  # shape and kind of elements; bytes where none is given


class Place(NamedTuple):
    """Where a lent block is: what the borrower needs to find it."""

    pid: int
    fd: int
    segment_id: int
    segment_bytes: int
    inode: int
    flag: int  # which of the page's
    start: int
    num_bytes: int

    @property
    def page(self) -> SegmentName:
        """The segment with the flags."""
        return SegmentName(self.pid, self.fd, self.segment_id, self.segment_bytes, self.inode)


@dataclass(eq=False)
class Slab:
    """Blocks of one size. `page` begins with their flags; `data` is their memory, 1D and bytes."""

    page: Segment
    data: torch.Tensor
    data_start: int  # of `data` in the segment, where it is there
    block_bytes: int
    num_blocks: int
    borrowers: list[int] = field(init=False)
    is_kept: bool = False  # for as long as the arena lives
    num_touched: int = 0  # blocks below this one have memory
    lent_at: float = 0.0

    def __post_init__(self) -> None:
        self.borrowers = [_GONE] * self.num_blocks

    @property
    def touched_bytes(self) -> int:
        """How much memory it takes: a page that was never written has none."""
        return self.num_touched * self.block_bytes

    def fill(self, start: int, source: torch.Tensor, num_bytes: int) -> None:
        """Copy so many bytes of a tensor's memory. Raises where it has fewer."""
        if self.data.is_cpu and source.is_cpu:
            copy_memory(source, num_bytes, self.data.data_ptr() + start)
        else:
            self.data[start : start + num_bytes].copy_(bytes_of(source, num_bytes))

    def lent_indexes(self) -> list[int]:
        """The blocks that are out, those of borrowers who left aside."""
        flags = self.page.memory[: self.num_blocks]
        return [index for index in range(self.num_blocks) if flags[index] and self.borrowers[index] != _GONE]


def new_host_slab(block_bytes: int, num_blocks: int) -> Slab:
    """A slab of shared memory. Raises ConfigError when the machine can't have it."""
    segment = own_segment(mmap.PAGESIZE + block_bytes * num_blocks, is_reclaimed=False)
    return Slab(segment, segment.tensor[mmap.PAGESIZE :], mmap.PAGESIZE, block_bytes, num_blocks)


class Arena:
    """The slabs that one worker lends from. Thread-safe.

    Idle slabs beyond `kept_bytes` are given back to the system.
    """

    def __init__(
        self, new_slab: Callable[[int, int], Slab] = new_host_slab, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._new_slab = new_slab
        self._kept_bytes = kept_bytes
        self._slabs: dict[int, list[Slab]] = {}  # by the size of their blocks
        self._retired: list[Slab] = []
        self._mutex = threading.Lock()
        self._num_slabs = 0
        self._trimmed_at = 0.0
        self._is_closed = False

    def put(self, source: torch.Tensor, peer_id: int, num_bytes: int | None = None) -> Place | None:
        """Copy so many bytes of a tensor's memory, or all, into a block and lend that to a peer.

        None when there is no memory for it. On a GPU the copy is only queued on the current stream.
        """
        num_bytes = source.nbytes if num_bytes is None else num_bytes
        with self._mutex:
            found = self._find_block(plan_block_bytes(num_bytes))
            if found is None:
                return None
            slab, index = found
            slab.page.memory[index] = LENT
            slab.borrowers[index] = peer_id
            slab.num_touched = max(slab.num_touched, index + 1)
            slab.lent_at = time.monotonic()
            if slab.lent_at - self._trimmed_at > _TRIM_SECS:
                self._trim()
        start = index * slab.block_bytes
        try:
            slab.fill(start, source, num_bytes)
        except BaseException:
            slab.page.memory[index] = FREE
            raise
        return Place(*slab.page.name, index, slab.data_start + start, num_bytes)

    def _find_block(self, block_bytes: int) -> tuple[Slab, int] | None:
        slabs = self._slabs.setdefault(block_bytes, [])
        for slab in slabs:
            index = slab.page.memory.find(bytes([FREE]), 0, slab.num_blocks)
            if index >= 0:
                return slab, index
        self._trim()
        if self._num_slabs >= _MAX_SLABS or self._is_closed:
            return None
        try:
            slab = self._new_slab(block_bytes, max(1, min(_MAX_BLOCKS, _SLAB_BYTES // block_bytes)))
        except ConfigError:  # there is another way for every tensor, if a slower one
            return None
        slabs.append(slab)
        self._num_slabs += 1
        return slab, 0

    def take_back(self, places: Iterable[Place]) -> None:
        """Free blocks that were lent in a message which is not sent."""
        wanted = {(place.segment_id, place.flag) for place in places}
        with self._mutex:
            for slab in self._all_slabs():
                for index in range(slab.num_blocks):
                    if (slab.page.name.segment_id, index) in wanted:
                        slab.page.memory[index] = FREE

    def reclaim(self, place: Place, peer_id: int, form: Form | None = None) -> Block:
        """What a block has that a peer hands back, in a form. It is free when the last user of it is gone.

        Raises WireError for a block that the peer does not have.
        """
        with self._mutex:
            for slab in self._all_slabs():
                if slab.page.name == place.page and place.flag < slab.num_blocks:
                    start = slab.data_start + place.flag * slab.block_bytes
                    is_whole = place.start == start and 0 < place.num_bytes <= slab.block_bytes
                    is_lent = slab.page.memory[place.flag] == LENT
                    if is_whole and is_lent and slab.borrowers[place.flag] == peer_id:
                        block, _, _ = _borrow(slab.page, place, form)
                        slab.borrowers[place.flag] = _OWN
                        return block
        raise WireError(f"worker {peer_id} hands a block back that it does not have: {place}")

    def release_peer(self, peer_id: int) -> None:
        """Stop waiting for the blocks of a peer that died or left."""
        with self._mutex:
            for slabs in self._slabs.values():
                for slab in list(slabs):
                    held = [index for index in slab.lent_indexes() if slab.borrowers[index] == peer_id]
                    if held:
                        slabs.remove(slab)
                        self._retired.append(slab)
            for slab in self._retired:
                slab.borrowers = [_GONE if borrower == peer_id else borrower for borrower in slab.borrowers]
            self._trim()

    def trim(self) -> None:
        """Give idle memory back. `put` does so too, now and then."""
        with self._mutex:
            self._trim()

    def _trim(self) -> None:
        # A retired slab is kept as long as a message about it may still be under way to somebody.
        self._retired = [slab for slab in self._retired if slab.lent_indexes()]
        excess = self._touched_bytes() - self._kept_bytes
        idle_first = sorted(
            (slab for slabs in self._slabs.values() for slab in slabs), key=lambda s: s.lent_at
        )
        for slab in idle_first:
            if excess <= 0:
                break
            if not slab.is_kept and slab.page.memory.find(bytes([LENT]), 0, slab.num_blocks) < 0:
                excess -= slab.touched_bytes
                self._slabs[slab.block_bytes].remove(slab)
                _empty(slab)
        self._num_slabs = sum(1 for _ in self._all_slabs())
        self._trimmed_at = time.monotonic()

    def close(self) -> None:
        """Forget all blocks. Those that are lent live on in their borrowers."""
        with self._mutex:
            self._is_closed = True
            for slabs in self._slabs.values():
                for slab in slabs:
                    if not slab.lent_indexes():
                        _empty(slab)
            self._slabs.clear()
            self._retired.clear()
            self._num_slabs = 0

    @property
    def num_blocks_in_use(self) -> int:
        """How many blocks are lent."""
        with self._mutex:
            return sum(len(slab.lent_indexes()) for slab in self._all_slabs())

    @property
    def num_bytes(self) -> int:
        """How much memory the blocks take, free ones included."""
        with self._mutex:
            return self._touched_bytes()

    def _touched_bytes(self) -> int:
        return sum(slab.touched_bytes for slab in self._all_slabs())

    def _all_slabs(self) -> Iterable[Slab]:
        yield from self._retired
        for slabs in self._slabs.values():
            yield from slabs


def plan_block_bytes(num_bytes: int) -> int:
    """The size of the blocks for so many bytes: four sizes in each octave, so at most a quarter is wasted."""
    num_bytes = max(num_bytes, _SMALLEST_BLOCK_BYTES)
    step = 1 << max(0, (num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // step) * step


def _empty(slab: Slab) -> None:
    """Return the pages to the system, even while a peer has them mapped."""
    slab.page.memory.madvise(mmap.MADV_REMOVE)


class _Loan(NamedTuple):
    """A block that is in use here."""

    place: Place
    peer_id: int
    end: weakref.finalize[Any, Any]


class Borrower:
    """Blocks that peers lent, as tensors. Thread-safe."""

    def __init__(self) -> None:
        self._segments = MappedSegments()
        self._pids: dict[int, set[int]] = {}  # a peer's processes
        self._loans: dict[int, _Loan] = {}  # by the address of the block

    def page_of(self, place: Place, peer_id: int) -> Segment:
        """The flags of the block's slab. Raises PeerError when its owner is gone."""
        self._pids.setdefault(peer_id, set()).add(place.pid)
        if not (0 <= place.flag < _MAX_BLOCKS and place.start >= 0 and place.num_bytes > 0):
            raise WireError(f"worker {peer_id} lends a block that can't be: {place}")
        segment = self._segments.get(place.page, peer_id)
        if segment.name != place.page:  # of a process that is gone, whose number another one has now
            self._segments.drop(place.pid, [place.segment_id])
            segment = self._segments.get(place.page, peer_id)
        return segment

    def borrow(self, place: Place, peer_id: int, form: Form | None = None) -> Block:
        """What the block has, in a form, to read and write. It goes back when the last user of it is gone."""
        segment = self.page_of(place, peer_id)
        if place.start < mmap.PAGESIZE or place.start + place.num_bytes > segment.name.num_bytes:
            raise WireError(f"worker {peer_id} lends a block outside of its memory: {place}")
        block, address, end = _borrow(segment, place, form, self._loans)
        self._loans[address] = _Loan(place, peer_id, end)
        return block

    def hand_back(self, tensor: torch.Tensor, num_bytes: int, peer_id: int) -> Place | None:
        """Give a block back to its lender as it is now, to be told in a message; None where that can't be.

        The tensor must be the caller's alone and not be used any more. That nothing else has its memory is
        seen to here.
        """
        loan = self._loans.get(tensor.data_ptr())
        if loan is None or loan.peer_id != peer_id or loan.place.num_bytes != num_bytes:
            return None
        if not _is_alone(tensor) or loan.end.detach() is None:
            return None
        del self._loans[tensor.data_ptr()]
        return loan.place

    def withdraw(self, place: Place, peer_id: int) -> None:
        """Free a block that was handed back in a message which is not sent."""
        try:
            _free(self.page_of(place, peer_id).memory, place.flag)
        except (PeerError, StateError, OSError):
            return  # its owner is gone, and knows no flags any more

    def release_peer(self, peer_id: int) -> None:
        """Unmap what a peer lent. Tensors on it live on."""
        for pid in self._pids.pop(peer_id, ()):
            self._segments.drop(pid, None)

    def close(self) -> None:
        """Unmap everything. Tensors on it live on."""
        for peer_id in list(self._pids):
            self.release_peer(peer_id)


def _borrow(
    segment: Segment, place: Place, form: Form | None, loans: dict[int, _Loan] | None = None
) -> tuple[Block, int, weakref.finalize[Any, Any]]:
    """What a block has, its address, and what frees it when the former is gone.

    Raises WireError for a form of another size than the block's.
    """
    shape, dtype = form or ((place.num_bytes,), _BYTE)
    if math.prod(shape) * dtype.itemsize != place.num_bytes:
        raise WireError(f"{place.num_bytes} bytes for a tensor of shape {shape} and {dtype}")
    block = np.ndarray(shape, dtype, segment.memory, place.start)
    address = segment.address + place.start
    end = weakref.finalize(block, _give_back, os.getpid(), segment.memory, place.flag, loans, address)
    end.atexit = False
    return block, address, end


def _give_back(
    borrower: int, memory: mmap.mmap, flag: int, loans: dict[int, _Loan] | None, address: int
) -> None:
    if loans is not None:
        loans.pop(address, None)  # first: once it is free it may be lent to this worker again
    # A forked child drops its copy of the tensor when it ends: the block is still its parent's.
    if os.getpid() == borrower:
        _free(memory, flag)


def _free(memory: mmap.mmap, flag: int) -> None:
    kernel.fence()  # the block is not free before all reads and writes of it are done
    memory[flag] = FREE


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing but Python's references holds a plain tensor, and nothing else its memory."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return False
    return _count_holders(tensor) == _count_fresh()


def _count_holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = tensor.untyped_storage()  # one object, however often it is asked for
    return holder_count(tensor), use_count(tensor), sys.getrefcount(storage)


@cache
def _count_fresh() -> tuple[int, int, int]:
    return _count_holders(torch.frombuffer(bytearray(8), dtype=torch.uint8))
