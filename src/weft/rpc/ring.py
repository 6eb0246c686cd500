"""Messages between two workers of one host, through memory that both have mapped.

A `Ring` has one writer and one reader. The writer puts a message behind the last one and moves `tail`; the
reader takes it out and moves `head`. Neither waits: a full ring is the writer's to deal with, and who sleeps
is woken by a `Bell`.

    bytes 0..8     head: how far the reader is
    bytes 16..40   ids of the writer and of the reader, and whether the reader has opened it
    bytes 64..72   tail: how far the writer is
    bytes 128..    entries: number of parts, length of each, the parts; aligned to 8, never across the end

Invariant: head <= tail <= head + capacity. Both only grow; where they point is their remainder. A ring is
opened once, by the worker that it was made for: a peer that names another one's ring gets none.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Sequence

from weft.errors import PeerError, StateError
from weft.local import kernel
from weft.local.segment import Segment, SegmentName, open_segment, own_segment

Part = bytes | memoryview

RING_BYTES = 1 << 20
_START = 128
_ALIGNED = ~7  # of a number of bytes plus 7: a multiple of 8
_HEAD, _WRITER, _READER, _IS_OPENED, _TAIL = 0, 2, 3, 4, 8  # as indices of 64-bit words
_KIND = "weft-ring"  # of memory
_LENGTHS = [struct.Struct(f"<{1 + num_parts}Q") for num_parts in range(9)]
_ONE_PART = _LENGTHS[1]
_COUNT = struct.Struct("<Q")
_SKIP = (1 << 64) - 1  # in the place of a number of parts: go on at the start
_SPILL = (1 << 64) - 2  # the message lies in a segment of its own, whose name follows
_SPILL_NAME = struct.Struct("<QQQQQQ")  # the name, and the number of bytes of the message's entry


class RingWriter:
    """The writing end, from one worker to another. One thread at a time."""

    def __init__(self, own_id: int, peer_id: int) -> None:
        # Not reclaimed: the reader takes out what is there even when this end is gone.
        self._segment = own_segment(_START + RING_BYTES, is_reclaimed=False, kind=_KIND)
        self.name: SegmentName = self._segment.name
        self._words: memoryview = memoryview(self._segment.memory).cast("Q")
        self._words[_WRITER], self._words[_READER] = own_id, peer_id
        self._data = memoryview(self._segment.memory)[_START : _START + RING_BYTES]
        self._tail = 0
        self._spilled: deque[tuple[int, Segment]] = deque()

    @property
    def has_spilled(self) -> bool:
        """Whether a message lies outside of the ring, in memory that goes with this end."""
        return bool(self._spilled) and self._spilled[-1][0] > self._words[_HEAD]

    def write(self, parts: Sequence[Part]) -> bool:
        """Put a message in; False when there is no room."""
        if self._spilled:
            self._forget_read()
        lengths = list(map(len, parts))
        num_bytes = 8 + 8 * len(lengths) + sum(lengths)
        if num_bytes > RING_BYTES // 4:
            return self._spill(parts, lengths, num_bytes)
        at = self._reserve(num_bytes)
        if at is None:
            return False
        if len(parts) == 1:  # the usual case, without a loop
            _ONE_PART.pack_into(self._data, at, 1, lengths[0])
            self._data[at + _ONE_PART.size : at + num_bytes] = parts[0]
        else:
            _put(self._data, at, parts, lengths)
        self._publish(num_bytes)
        return True

    def _reserve(self, num_bytes: int) -> int | None:
        """Where an entry of that size can go; None when there is no room."""
        at = self._tail % RING_BYTES
        skipped = RING_BYTES - at if at + num_bytes > RING_BYTES else 0
        if self._tail + skipped + (num_bytes + 7 & _ALIGNED) - self._words[_HEAD] > RING_BYTES:
            return None
        if skipped:
            _COUNT.pack_into(self._data, at, _SKIP)
            self._tail += skipped
            at = 0
        return at

    def _publish(self, num_bytes: int) -> None:
        self._tail += num_bytes + 7 & _ALIGNED
        if kernel.NEEDS_FENCES:
            kernel.fence()  # the entry is there before the tail says so
        self._words[_TAIL] = self._tail

    def _forget_read(self) -> None:
        while self._spilled and self._spilled[0][0] <= self._words[_HEAD]:
            self._spilled.popleft()

    def _spill(self, parts: Sequence[Part], lengths: list[int], num_bytes: int) -> bool:
        entry_bytes = 8 + _SPILL_NAME.size
        at = self._reserve(entry_bytes)
        if at is None:
            return False
        segment = own_segment(num_bytes, is_reclaimed=False)
        _put(memoryview(segment.memory), 0, parts, lengths)
        _COUNT.pack_into(self._data, at, _SPILL)
        _SPILL_NAME.pack_into(self._data, at + 8, *segment.name, num_bytes)
        self._publish(entry_bytes)
        self._spilled.append((self._tail, segment))  # until it is read: the reader opens it by its name
        return True


class RingReader:
    """The reading end. One thread at a time. Raises PeerError for a ring that is not this worker's."""

    def __init__(self, name: SegmentName, peer_id: int, own_id: int) -> None:
        self.peer_id = peer_id
        if name.num_bytes != -(-(_START + RING_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE:
            raise PeerError(
                f"worker {peer_id} offers {name.num_bytes} bytes as a ring, which has another length. All "
                "workers must run the same version of weft.",
                [peer_id],
            )
        segment = open_segment(name, peer_id, _KIND)
        self._words: memoryview = memoryview(segment.memory).cast("Q")
        if (self._words[_WRITER], self._words[_READER], self._words[_IS_OPENED]) != (peer_id, own_id, 0):
            raise PeerError(
                f"worker {peer_id} offers a ring that was made by or for another worker, or that is in use "
                "already.",
                [peer_id],
            )
        self._words[_IS_OPENED] = 1
        self._data = memoryview(segment.memory)[_START : _START + RING_BYTES]
        self._head = 0

    def has_mail(self) -> bool:
        """Whether there is a message."""
        return self._words[_TAIL] != self._head

    def read(self) -> list[Part] | None:
        """Take out the next message; None when there is none."""
        if self._words[_TAIL] == self._head:
            return None
        if kernel.NEEDS_FENCES:
            kernel.fence()  # what lies before the tail is read after the tail
        at = self._head % RING_BYTES
        (num_parts,) = _COUNT.unpack_from(self._data, at)
        if num_parts == _SKIP:
            self._move(RING_BYTES - at)
            return self.read()
        if num_parts == _SPILL:
            *name, num_bytes = _SPILL_NAME.unpack_from(self._data, at + 8)
            try:
                segment = open_segment(SegmentName(*name), self.peer_id)
            except (PeerError, StateError, OSError):
                segment = None  # the writer is gone, and with it what it had not handed over
            self._move(8 + _SPILL_NAME.size)
            if segment is None:
                return self.read()
            return _get(memoryview(segment.memory)[:num_bytes], 0, is_copied=False)[0]
        if num_parts == 1:
            (num_bytes,) = _COUNT.unpack_from(self._data, at + _COUNT.size)
            part = bytes(self._data[at + _ONE_PART.size : at + _ONE_PART.size + num_bytes])
            self._move(_ONE_PART.size + num_bytes)
            return [part]
        parts, num_bytes = _get(self._data, at, is_copied=True)
        self._move(num_bytes)
        return parts

    def _move(self, num_bytes: int) -> None:
        self._head += num_bytes + 7 & _ALIGNED
        if kernel.NEEDS_FENCES:
            kernel.fence()  # the entry is read before its room is free
        self._words[_HEAD] = self._head


def _put(data: memoryview, at: int, parts: Sequence[Part], lengths: list[int]) -> None:
    table = _table(len(lengths))
    table.pack_into(data, at, len(lengths), *lengths)
    at += table.size
    for part, length in zip(parts, lengths, strict=True):
        data[at : at + length] = part
        at += length


def _get(data: memoryview, at: int, *, is_copied: bool) -> tuple[list[Part], int]:
    """The parts of an entry, and how many bytes it has."""
    start = at
    (num_parts,) = _COUNT.unpack_from(data, at)
    table = _table(num_parts)
    _, *lengths = table.unpack_from(data, at)
    at += table.size
    parts: list[Part] = []
    for length in lengths:
        part = data[at : at + length]
        parts.append(bytes(part) if is_copied else part)
        at += length
    return parts, at - start


def _table(num_parts: int) -> struct.Struct:
    return _LENGTHS[num_parts] if num_parts < len(_LENGTHS) else struct.Struct(f"<{1 + num_parts}Q")
