"""The page of shared memory where the ranks of a group meet.

Each rank has one line that it alone writes and everyone reads:

    phase      counts up at every step of every collective; peers wait on it (a futex)
    state      open, left or failed, with the reason and the ranks to blame
    calls      two slots: what this rank calls now, and where its tensor lies
    freed      the last segments that this rank gave back, for peers that have them mapped

and, behind the lines, two small inline buffers for tensors of a few kilobytes.

Invariant: a rank is never more than one collective ahead of another, because
each collective begins by waiting for everyone. So two slots and two inline
buffers, used in turn, are never overwritten while a peer still reads them.

Waiting and blaming is `waiting.py`'s work; this file only knows the layout.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from weft.local import kernel
from weft.local.segment import Segment, SegmentName

INLINE_BYTES = 32 * 1024
_LINE_BYTES = 1024
_PHASE_AT = 0
_STATE_AT = 64
_REASON_BYTES = 384
_BLAMED_TOLD = 32
_SLOTS_AT = 512
_SLOT_BYTES = 128
_FREED_AT = 768
_FREED_KEPT = 16
_FREED_COUNT_AT = 896
_MAILBOX_BELL_AT = 960  # its own cache line: the mailbox rings it

_STATE = struct.Struct(f"<iiI{_REASON_BYTES}s")  # state, whether time ran out, length, words
# op, reduce op, dtype, root; element count; call number
_SIGNATURE = struct.Struct("<HHHhqQ")
_PLACE = struct.Struct("<iiqqqqdq")


class RankState(IntEnum):
    """What a rank last said about itself."""

    ABSENT = 0
    OPEN = 1
    LEFT = 2
    FAILED = 3


class PlaceKind(IntEnum):
    """Where the tensor of a call lies."""

    NOWHERE = 0  # this rank only receives
    INLINE = 1  # in the board's inline buffer
    SEGMENT = 2  # in a segment that peers can map
    ADDRESS = 3  # in the rank's own memory, for cross-memory copies or for its sister threads


class Reason(NamedTuple):
    """Why a rank gave up."""

    words: str
    blamed: tuple[int, ...]  # ranks of the group
    is_timeout: bool = False


class Signature(NamedTuple):
    """What must be equal on every rank of a collective."""

    op: int
    reduce_op: int
    dtype: int
    root: int
    numel: int
    number: int  # how many collectives this group did before


class Place(NamedTuple):
    """Where a rank's tensor lies, on which GPU, and the factor it is to be multiplied by."""

    kind: int  # a PlaceKind
    fd: int = 0
    segment_id: int = 0
    num_bytes: int = 0  # of the segment
    inode: int = 0  # of the segment
    start: int = 0  # offset in the segment, or the address
    factor: float = 1.0
    gpu: int = 0  # a number of the rank's GPU that is the same in every process

    def segment(self, pid: int) -> SegmentName:
        """The segment's name, for a Place of kind SEGMENT."""
        return SegmentName(pid, self.fd, self.segment_id, self.num_bytes, self.inode)


class Board:
    """One rank's view of the page."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._segment = segment
        self._bytes = memoryview(segment.memory)
        self._counters = self._bytes[: size * _LINE_BYTES].cast("Q")
        stride = _LINE_BYTES // 8
        self._phase_index = [peer * stride for peer in range(size)]
        self._bell_index = [peer * stride + _MAILBOX_BELL_AT // 8 for peer in range(size)]
        self._phase_word = [self._word(peer, _PHASE_AT) for peer in range(size)]
        self._bell_word = [self._word(peer, _MAILBOX_BELL_AT) for peer in range(size)]
        inline = segment.tensor[size * _LINE_BYTES :][: size * 2 * INLINE_BYTES]
        self._inline = inline.view(size, 2, INLINE_BYTES)  # rank, slot, byte
        self._inline_views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @staticmethod
    def num_bytes(size: int) -> int:
        """How large the board of a group of `size` ranks is."""
        return size * (_LINE_BYTES + 2 * INLINE_BYTES)

    def inline(self, rank: int, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """A rank's inline buffer as elements of a dtype."""
        # Views cost a microsecond each, so they are made once.
        view = self._inline_views.get((rank, slot, dtype))
        if view is None:
            with torch.inference_mode(False):  # it outlives the caller's inference mode
                view = self._inline_views[rank, slot, dtype] = self._inline[rank, slot].view(dtype)
        return view

    def _word(self, rank: int, at: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._segment.address + rank * _LINE_BYTES + at)

    # -- phases ---------------------------------------------------------------

    def phase(self, rank: int) -> int:
        """How many steps the rank has done."""
        return self._counters[self._phase_index[rank]]

    def advance(self) -> int:
        """Say that this rank has done one more step, and wake whoever waits for it."""
        index, word = self._phase_index[self.rank], self._phase_word[self.rank]
        kernel.fence()
        phase = self._counters[index] + 1
        self._counters[index] = phase
        kernel.futex_wake(word)
        return phase

    def sleep_on_phase(self, rank: int, seen: int, secs: float) -> None:
        """Sleep until the rank's phase is no longer `seen`, `secs` at most."""
        kernel.futex_wait(self._phase_word[rank], seen, secs)

    def wake_everyone(self) -> None:
        """Wake all sleepers of the group, so that they look at the states."""
        for rank in range(self.size):
            kernel.futex_wake(self._phase_word[rank])
            kernel.futex_wake(self._bell_word[rank])

    # -- the mailbox's bell ---------------------------------------------------

    def bell(self, rank: int) -> int:
        """A counter that senders raise when they put something into the rank's mailbox."""
        return self._counters[self._bell_index[rank]]

    def ring(self, rank: int) -> None:
        """Tell the rank to look into its mailbox. Lost increments are harmless: any change wakes."""
        self._counters[self._bell_index[rank]] = (self.bell(rank) + 1) & 0xFFFFFFFF
        kernel.futex_wake(self._bell_word[rank])

    def sleep_on_bell(self, seen: int, secs: float) -> None:
        """Sleep until this rank's bell rings, `secs` at most."""
        kernel.futex_wait(self._bell_word[self.rank], seen, secs)

    # -- states ---------------------------------------------------------------

    def state(self, rank: int) -> int:
        """What the rank last said about itself: a RankState."""
        return self._bytes[rank * _LINE_BYTES + _STATE_AT]

    def reason(self, rank: int) -> Reason:
        """Why the rank failed, and whom it blames."""
        at = rank * _LINE_BYTES + _STATE_AT
        _, is_timeout, length, text = _STATE.unpack_from(self._bytes, at)
        ranks, _, words = text[:length].decode(errors="replace").partition(":")
        known = {str(rank): rank for rank in range(self.size)}  # the text may be truncated, or damaged
        blamed = tuple(known[word] for word in ranks.split() if word in known)
        return Reason(words, blamed, bool(is_timeout))

    def set_state(self, state: RankState, reason: Reason | None = None) -> None:
        """Say how this rank is, and wake everyone to see it."""
        at = self.rank * _LINE_BYTES + _STATE_AT
        if reason is not None:
            text = f"{' '.join(map(str, reason.blamed[:_BLAMED_TOLD]))}:{reason.words}".encode()
            text = text[:_REASON_BYTES]
            # The reason first: a peer that sees the new state must find its reason there.
            _STATE.pack_into(self._bytes, at, self._bytes[at], reason.is_timeout, len(text), text)
            kernel.fence()
        self._bytes[at] = state
        self.wake_everyone()

    # -- freed segments ---------------------------------------------------------

    def note_freed(self, segment_id: int) -> None:
        """Tell the peers that this rank gave a segment back."""
        count_at = (self.rank * _LINE_BYTES + _FREED_COUNT_AT) // 8
        first = (self.rank * _LINE_BYTES + _FREED_AT) // 8
        self._counters[first + self._counters[count_at] % _FREED_KEPT] = segment_id
        self._counters[count_at] += 1

    def num_freed(self, rank: int) -> int:
        """How many segments the rank has given back so far."""
        return self._counters[(rank * _LINE_BYTES + _FREED_COUNT_AT) // 8]

    def freed_since(self, rank: int, seen: int) -> list[int] | None:
        """Which segments the rank gave back after the first `seen`; None if too many to tell."""
        count = self.num_freed(rank)
        if count - seen > _FREED_KEPT // 2:  # a rank may add some while we read
            return None
        first = (rank * _LINE_BYTES + _FREED_AT) // 8
        return [self._counters[first + index % _FREED_KEPT] for index in range(seen, count)]

    # -- calls ----------------------------------------------------------------

    pack = staticmethod(_SIGNATURE.pack)  # a Signature's fields as the bytes that ranks compare

    def post(self, slot: int, signature: bytes, place: Place) -> None:
        """Write what this rank calls and where its tensor lies into its slot."""
        at = self.rank * _LINE_BYTES + _SLOTS_AT + slot * _SLOT_BYTES
        self._bytes[at : at + _SIGNATURE.size] = signature
        _PLACE.pack_into(self._bytes, at + _SIGNATURE.size, *place)

    def same_call(self, rank: int, slot: int, signature: bytes) -> bool:
        """Whether the rank posted this very signature."""
        at = rank * _LINE_BYTES + _SLOTS_AT + slot * _SLOT_BYTES
        return self._bytes[at : at + _SIGNATURE.size].tobytes() == signature

    def signature(self, rank: int, slot: int) -> Signature:
        """What the rank posted."""
        at = rank * _LINE_BYTES + _SLOTS_AT + slot * _SLOT_BYTES
        return Signature(*_SIGNATURE.unpack_from(self._bytes, at))

    def place(self, rank: int, slot: int) -> Place:
        """Where the rank's tensor lies."""
        at = rank * _LINE_BYTES + _SLOTS_AT + slot * _SLOT_BYTES + _SIGNATURE.size
        return Place(*_PLACE.unpack_from(self._bytes, at))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor. Shares the memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
