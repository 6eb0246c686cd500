"""How a rank's CPU tensors become readable to its peers.

In order of preference:
1. a few kilobytes are copied into the board's inline buffer;
2. a tensor from `allocate` lies in a segment that peers map: read in place;
3. another tensor is read from the rank's own memory: by sister threads in place,
   by other processes in one copy made by the kernel, where it lets them;
4. otherwise it is copied into a segment of the group's own first, and back afterwards.

What a peer publishes is checked: a tensor in a segment must lie inside it. An address can't be checked, and
need not be: it is an address of the peer's own memory, in a page that only processes of this user can open,
and what is read or written there belongs to the peer and not to this rank.

A CudaMemory (cuda.py) does the same for tensors on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from weft.errors import TamperedError
from weft.local.board import INLINE_BYTES, Board, Place, PlaceKind
from weft.local.kernel import OWN_MEMORY, RemoteMemory
from weft.local.roster import Roster
from weft.local.segment import MappedSegments, Segment, SegmentName, own_segment, part_of
from weft.local.windows import RemoteWindow, Scratch, TensorWindow, Window

# Work is done in pieces that stay in a core's cache; 128 to 512 KB did equally well.
PIECE_BYTES = 256 * 1024
_ALIGN_NUMEL = 64  # shares begin at cache lines, for every dtype
_INLINE = Place(PlaceKind.INLINE)
Share = tuple[int, int]  # elements lo..hi


class Memory(Protocol):
    """Where tensors of one device lie, for the length of one collective."""

    piece_bytes: int
    scratch: Scratch

    @property
    def device_number(self) -> int:
        """Of the kind of device, for signatures."""
        ...

    gpu: int  # a number of the GPU that is the same in every process; 0 on the CPU

    def is_inline(self, numel: int, dtype: torch.dtype | None) -> bool:
        """Whether a tensor of this size goes into the inline buffers."""
        ...

    def expose(self, tensor: torch.Tensor, slot: int, own: Share, *, may_inline: bool) -> Place:
        """Make a flat tensor readable to the peers; the answer tells them where it is.

        No peer reads or writes the elements of `own`, so these need not be exposed.
        """
        ...

    def settle(self, tensor: torch.Tensor, own: Share) -> None:
        """Bring what peers wrote into an exposed copy, if there is one, back into `tensor`."""
        ...

    def window(self, peer: int, place: Place, dtype: torch.dtype, numel: int, slot: int) -> Window:
        """The peer's exposed tensor."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes that peers read where they lie."""
        ...

    def plan_share(self, numel: int, size: int, rank: int) -> Share:
        """Which elements a rank reduces for all. Shares don't overlap and leave none out."""
        ...

    def learn_gpus(self, gpus: Sequence[int]) -> None:
        """Hear which GPU each rank uses. Called after every meeting on GPUs, on every rank."""
        ...

    def finish_writes(self) -> None:
        """Make sure that what this rank wrote is there, before it tells the others so."""
        ...


class CpuMemory:
    """The memory of CPU tensors. Used by one collective at a time."""

    piece_bytes = PIECE_BYTES
    device_number = 0
    gpu = 0

    def __init__(self, board: Board, roster: Roster, segments: MappedSegments, *, is_direct: bool) -> None:
        self._board = board
        self._roster = roster
        self.is_direct = is_direct  # every rank may read and write every other's memory
        self.scratch = Scratch(torch.device("cpu"))
        self._mapped = segments
        self._remote = [RemoteMemory(member.pid, member.global_rank) for member in roster.members]
        self._allocated: dict[int, SegmentName] = {}  # by the storage's address
        self._staging: Segment | None = None
        self._is_staged = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A new segment, as bytes. It is freed with the last tensor that uses it."""
        segment = self._own_segment(num_bytes)
        self._allocated[segment.address] = segment.name
        weakref.finalize(segment.memory, self._allocated.pop, segment.address, None).atexit = False
        return segment.tensor[:num_bytes]

    def _own_segment(self, num_bytes: int) -> Segment:
        """A new segment; peers hear of it when it is freed."""
        segment = own_segment(num_bytes)
        finalizer = weakref.finalize(
            segment.memory, _tell_freed, weakref.ref(self._board), os.getpid(), segment.name.segment_id
        )
        finalizer.atexit = False
        return segment

    def is_inline(self, numel: int, dtype: torch.dtype | None) -> bool:
        """Whether a tensor of this size goes into the inline buffers."""
        return dtype is None or numel * dtype.itemsize <= INLINE_BYTES

    def expose(self, tensor: torch.Tensor, slot: int, own: Share, *, may_inline: bool) -> Place:
        """Make a flat tensor readable to the peers; the answer tells them where it is."""
        num_bytes = tensor.numel() * tensor.element_size()
        self._is_staged = False
        if may_inline and num_bytes <= INLINE_BYTES:
            self._board.inline(self._board.rank, slot, tensor.dtype)[: tensor.numel()].copy_(tensor)
            return _INLINE
        address = tensor.data_ptr()
        if self._allocated:
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            name = self._allocated.get(base)
            # An entry goes just after its memory: another tensor may lie there for a moment.
            if name is not None and storage.nbytes() == name.num_bytes:
                return segment_place(name, address - base)
        if self.is_direct and not is_pinned(tensor):
            return Place(PlaceKind.ADDRESS, start=address)
        staging = self._staging_of(num_bytes)
        copy_around(staging.tensor[:num_bytes].view(tensor.dtype), tensor, own)
        self._is_staged = True
        return segment_place(staging.name, 0)

    def _staging_of(self, num_bytes: int) -> Segment:
        if self._staging is None or self._staging.name.num_bytes < num_bytes:
            self._staging = None  # its memory goes back before the larger one is taken
            self._staging = self._own_segment(num_bytes)
        return self._staging

    def settle(self, tensor: torch.Tensor, own: Share) -> None:
        """Copy the staged bytes back, if the tensor was staged."""
        if self._is_staged and self._staging is not None:
            num_bytes = tensor.numel() * tensor.element_size()
            copy_around(tensor, self._staging.tensor[:num_bytes].view(tensor.dtype), own)

    def window(self, peer: int, place: Place, dtype: torch.dtype, numel: int, slot: int) -> Window:
        """The peer's exposed tensor."""
        num_bytes, kind = numel * dtype.itemsize, place.kind
        member = self._roster.members[peer]
        if kind == PlaceKind.INLINE:
            inline = self._board.inline(peer, slot, dtype)
            if num_bytes > INLINE_BYTES:
                part_of(inline.view(torch.uint8), 0, num_bytes, member.global_rank)  # raises
            return TensorWindow(inline)
        if kind == PlaceKind.SEGMENT:
            segment = self._mapped.get(place.segment(member.pid), member.global_rank)
            shared = part_of(segment.tensor, place.start, num_bytes, member.global_rank)
        elif kind != PlaceKind.ADDRESS:
            raise TamperedError(
                f"rank {member.global_rank} placed a tensor in memory of kind {kind}, which there is not. "
                "The ranks run different code, or another program of this user wrote into the shared memory."
            )
        elif member.is_thread_here:
            shared = tensor_at(place.start, num_bytes)
        else:
            return RemoteWindow(self._remote[peer], place.start, dtype, self.scratch)
        return TensorWindow(shared.view(dtype))

    def reach(self, peer: int) -> RemoteMemory:
        """The memory that the peer's addresses are of. For groups that are direct."""
        return OWN_MEMORY if self._roster.members[peer].is_thread_here else self._remote[peer]

    def plan_share(self, numel: int, size: int, rank: int) -> Share:
        """An equal share for each rank."""
        return plan_share(numel, size, rank)

    def learn_gpus(self, gpus: Sequence[int]) -> None:
        """Of no use here."""

    def finish_writes(self) -> None:
        """Nothing to do: a store is seen before the phase that follows it."""


def plan_share(numel: int, size: int, rank: int) -> Share:
    """Which elements of a tensor a rank reduces: equal shares, the last one shorter."""
    share = -(-numel // size)
    share = -(-share // _ALIGN_NUMEL) * _ALIGN_NUMEL
    return min(numel, rank * share), min(numel, (rank + 1) * share)


def _tell_freed(board: weakref.ref[Board], owner: int, segment_id: int) -> None:
    living = board()
    if living is not None and os.getpid() == owner:
        living.note_freed(segment_id)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the CUDA driver owns the memory: the kernel then refuses to copy from it."""
    return torch.cuda.is_initialized() and tensor.is_pinned()


def tensor_at(address: int, num_bytes: int) -> torch.Tensor:
    """Memory of this process as a tensor of bytes. The owner must keep it alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def segment_place(name: SegmentName, start: int) -> Place:
    """The place of a tensor in a segment."""
    return Place(PlaceKind.SEGMENT, name.fd, name.segment_id, name.num_bytes, name.inode, start)


def copy_around(out: torch.Tensor, source: torch.Tensor, own: Share) -> None:
    """Copy a flat tensor but for the elements of `own`."""
    for lo, hi in ((0, own[0]), (own[1], source.numel())):
        if lo < hi:
            out[lo:hi].copy_(source[lo:hi], non_blocking=True)
