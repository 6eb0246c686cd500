"""How a rank's CPU tensors become readable to its peers.

In order of preference:
1. a few kilobytes are copied into the board's inline buffer;
2. a tensor from `allocate` lies in a segment that peers map: read in place;
3. another tensor is read from the rank's own memory: by sister threads in place,
   by other processes in one copy made by the kernel, where it lets them;
4. otherwise it is copied into a segment of the group's own first, and back afterwards.

A CudaMemory (cuda.py) does the same for tensors on a GPU.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol

import torch

from weft.local.board import INLINE_BYTES, Board, Place, PlaceKind, as_bytes
from weft.local.kernel import RemoteMemory
from weft.local.roster import Roster
from weft.local.segment import MappedSegments, Segment, SegmentName, own_segment
from weft.local.windows import RemoteWindow, TensorWindow, Window, copy_in_pieces

# Work is done in pieces that stay in a core's cache; 128 to 512 KB did equally well.
PIECE_BYTES = 256 * 1024
_INLINE = Place(PlaceKind.INLINE)


class Memory(Protocol):
    """Where tensors of one device lie, for the length of one collective."""

    piece_bytes: int

    def is_inline(self, numel: int, dtype: torch.dtype | None) -> bool:
        """Whether a tensor of this size goes into the inline buffers."""
        ...

    def expose(self, tensor: torch.Tensor, slot: int, factor: float, *, may_inline: bool) -> Place:
        """Make a flat tensor readable to the peers; the answer tells them where it is."""
        ...

    def exposed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory that peers see: `tensor` itself, or the copy that was exposed."""
        ...

    def settle(self, tensor: torch.Tensor) -> None:
        """Bring the exposed copy, if there is one, back into `tensor`."""
        ...

    def window(self, peer: int, place: Place, dtype: torch.dtype, numel: int, slot: int) -> Window:
        """The peer's exposed tensor."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes that peers read where they lie."""
        ...

    def announce(self) -> None:
        """Before this rank tells the others that its part is done: order it for them."""
        ...

    def follow(self) -> None:
        """After every rank said that its part is done: order our next work behind it."""
        ...


class CpuMemory:
    """The memory of CPU tensors. Used by one collective at a time."""

    piece_bytes = PIECE_BYTES

    def __init__(self, board: Board, roster: Roster, *, is_direct: bool) -> None:
        self._board = board
        self._roster = roster
        self._is_direct = is_direct  # every rank may read every other's memory
        self._mapped = MappedSegments()
        self._remote = [RemoteMemory(member.pid, member.global_rank) for member in roster.members]
        self._allocated: dict[int, SegmentName] = {}  # by the storage's address
        self._staging: Segment | None = None
        self._is_staged = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A new segment, as bytes. It is freed with the last tensor that uses it."""
        segment = own_segment(num_bytes)
        self._allocated[segment.address] = segment.name
        weakref.finalize(segment.memory, self._allocated.pop, segment.address, None).atexit = False
        return segment.tensor[:num_bytes]

    def is_inline(self, numel: int, dtype: torch.dtype | None) -> bool:
        """Whether a tensor of this size goes into the inline buffers."""
        return dtype is None or numel * dtype.itemsize <= INLINE_BYTES

    def expose(self, tensor: torch.Tensor, slot: int, factor: float, *, may_inline: bool) -> Place:
        """Make a flat tensor readable to the peers; the answer tells them where it is."""
        num_bytes = tensor.numel() * tensor.element_size()
        self._is_staged = False
        if may_inline and num_bytes <= INLINE_BYTES:
            self._board.inline(self._board.rank, slot, tensor.dtype)[: tensor.numel()].copy_(tensor)
            return _INLINE if factor == 1.0 else _INLINE._replace(factor=factor)
        address = tensor.data_ptr()
        base = tensor.untyped_storage().data_ptr()
        name = self._allocated.get(base)
        if name is not None:
            return _segment_place(name, address - base, factor)
        if self._is_direct:
            return Place(PlaceKind.ADDRESS, start=address, factor=factor)
        staging = self._staging_of(num_bytes)
        _copy_bytes(staging.tensor[:num_bytes], as_bytes(tensor))
        self._is_staged = True
        return _segment_place(staging.name, 0, factor)

    def _staging_of(self, num_bytes: int) -> Segment:
        if self._staging is None or self._staging.name.num_bytes < num_bytes:
            self._staging = None  # its memory goes back before the larger one is taken
            self._staging = own_segment(num_bytes)
        return self._staging

    def exposed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The staged copy of the tensor, or the tensor itself."""
        if not self._is_staged or self._staging is None:
            return tensor
        num_bytes = tensor.numel() * tensor.element_size()
        return self._staging.tensor[:num_bytes].view(tensor.dtype)

    def settle(self, tensor: torch.Tensor) -> None:
        """Copy the staged bytes back, if the tensor was staged."""
        if self._is_staged:
            _copy_bytes(as_bytes(tensor), as_bytes(self.exposed(tensor)))

    def window(self, peer: int, place: Place, dtype: torch.dtype, numel: int, slot: int) -> Window:
        """The peer's exposed tensor."""
        if place.kind == PlaceKind.INLINE:
            return TensorWindow(self._board.inline(peer, slot, dtype), PIECE_BYTES)
        num_bytes = numel * dtype.itemsize
        member = self._roster.members[peer]
        if place.kind == PlaceKind.SEGMENT:
            segment = self._mapped.get(place.segment(member.pid), member.global_rank)
            shared = segment.tensor[place.start :]
        elif member.is_thread_here:
            shared = tensor_at(place.start, num_bytes)
        else:
            return RemoteWindow(self._remote[peer], place.start, dtype.itemsize)
        return TensorWindow(shared[:num_bytes].view(dtype), PIECE_BYTES)

    def announce(self) -> None:
        """Nothing to order: a store is seen before the phase that follows it."""

    def follow(self) -> None:
        """Nothing to order."""


def tensor_at(address: int, num_bytes: int) -> torch.Tensor:
    """Memory of this process as a tensor of bytes. The owner must keep it alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _segment_place(name: SegmentName, start: int, factor: float) -> Place:
    return Place(PlaceKind.SEGMENT, name.fd, name.segment_id, name.num_bytes, start, factor)


def _copy_bytes(out: torch.Tensor, source: torch.Tensor) -> None:
    copy_in_pieces(out, source, PIECE_BYTES)
