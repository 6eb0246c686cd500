"""Messages between two ranks: send, recv, recv from anyone, matched by tag.

A sender copies its tensor into a parcel (a shared segment of its own) and writes a
note into the ring from it to the receiver; it never waits for the receiver unless
the ring is full. A receiver matches notes to the receives it has posted, in order.
Sends and receives don't pass through the lane, so that a receive that waits keeps
nobody else from working.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.futures import Future

from weft.errors import DesyncError, PeerTimeoutError, TamperedError
from weft.local import kernel
from weft.local.board import Board, RankState, as_bytes
from weft.local.calls import dtype_number
from weft.local.meeting import Meeting
from weft.local.segment import MappedSegments, Segment, SegmentName, own_segment, part_of
from weft.local.waiting import TICK_SECS
from weft.local.work import LocalWork

_RING_NOTES = 32
_NOTE = struct.Struct("<qqqqqii")  # tag, element count, segment id, its bytes, inode, fd, dtype
_NOTE_BYTES = 64
_HEAD_AT, _TAIL_AT, _NOTES_AT = 0, 64, 128
_RING_BYTES = _NOTES_AT + _RING_NOTES * _NOTE_BYTES
_PARCEL_HEADER_BYTES = 64
_TAKEN = 1
ANY_SOURCE = -1
_undelivered: list[Segment] = []  # of groups that this process has left


def mailbox_num_bytes(size: int) -> int:
    """How much shared memory the rings of a group of `size` ranks need."""
    return size * size * _RING_BYTES


@dataclass(frozen=True, slots=True)
class _Letter:
    """A note that was taken out of a ring."""

    source: int
    tag: int
    numel: int
    dtype: int
    parcel: SegmentName


class ReceiveWork(LocalWork):
    """A posted receive. Whoever waits for it also empties the mailbox."""

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, source: int, tag: int, timeout_secs: float):
        super().__init__("recv", [tensor])
        self.tensor = tensor
        self.source = source
        self.tag = tag
        self.found_source = -1
        self._mailbox = mailbox
        self._deadline = time.monotonic() + timeout_secs

    def matches(self, letter: _Letter) -> bool:
        """Whether the letter is for this receive."""
        return self.tag == letter.tag and self.source in (ANY_SOURCE, letter.source)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the message is here."""
        if self.is_completed():
            return super().wait()
        if timeout is None or timeout.total_seconds() <= 0:
            self._mailbox.wait_for(self, self._deadline)
        elif not self._mailbox.wait_awhile_for(self, time.monotonic() + timeout.total_seconds()):
            raise PeerTimeoutError(
                f"{self._mailbox.words_of(self)} was not done within {timeout.total_seconds():g} s. It goes "
                "on: wait again for it.",
                self._mailbox.blamed_for(self),
            )
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the message is here."""
        if not super().is_completed():
            self._mailbox.deliver()
        return super().is_completed()

    def source_rank(self) -> int:
        """Who sent the message."""
        return self.found_source

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the message; a thread waits for it."""
        future = super().get_future()
        if not super().is_completed():
            threading.Thread(target=self._drive, name="weft-recv", daemon=True).start()
        return future

    def _drive(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            if not super().is_completed():
                self.finish(error)


class Mailbox:
    """One rank's end of all rings."""

    def __init__(self, rings: memoryview, meeting: Meeting, segments: MappedSegments) -> None:
        self._rings = rings
        self._meeting = meeting
        self._board: Board = meeting.board
        self._mutex = threading.Lock()
        self._posted: list[ReceiveWork] = []
        self._letters: list[_Letter] = []
        self._parcels: list[Segment] = []
        self._mapped = segments

    # -- sending ----------------------------------------------------------------

    def send(self, tensor: torch.Tensor, target: int, tag: int, timeout_secs: float) -> None:
        """Put a flat CPU tensor into a parcel and a note into the target's ring."""
        self._meeting.check_open()
        num_bytes = tensor.numel() * tensor.element_size()
        deadline = time.monotonic() + timeout_secs
        with self._mutex:
            parcel = self._take_parcel(_PARCEL_HEADER_BYTES + num_bytes)
            payload = parcel.tensor[_PARCEL_HEADER_BYTES:][:num_bytes]
            payload.copy_(as_bytes(tensor))
        name = parcel.name
        dtype = dtype_number(tensor.dtype)
        note = _NOTE.pack(tag, tensor.numel(), name.segment_id, name.num_bytes, name.inode, name.fd, dtype)
        ring = self._ring(self._meeting.rank, target)
        counters = ring[:_NOTES_AT].cast("Q")

        def is_full() -> bool:
            return counters[_HEAD_AT // 8] - counters[_TAIL_AT // 8] >= _RING_NOTES

        def put_note() -> bool:
            with self._mutex:
                if is_full():
                    return False
                at = _NOTES_AT + (counters[_HEAD_AT // 8] % _RING_NOTES) * _NOTE_BYTES
                ring[at : at + _NOTE.size] = note
                kernel.fence()
                counters[_HEAD_AT // 8] += 1
                return True

        what = f"send(to {self._name(target)}, tag {tag})"
        if not self._is_done_by(deadline, put_note, target, lambda: what):
            self._meeting.waiter.give_up(lambda: what, [target])
        self._board.ring(target)

    def _take_parcel(self, num_bytes: int) -> Segment:
        for parcel in self._parcels:
            if parcel.name.num_bytes >= num_bytes and parcel.memory[0] == _TAKEN:
                parcel.memory[0] = 0
                return parcel
        parcel = own_segment(num_bytes)
        # Those that are free and too small go, or growing messages would pile them up.
        self._parcels = [kept for kept in self._parcels if kept.memory[0] != _TAKEN]
        self._parcels.append(parcel)
        return parcel

    def close(self) -> None:
        """Keep what nobody has received yet where its receiver finds it, while this process lives."""
        _undelivered[:] = [parcel for parcel in _undelivered if parcel.memory[0] != _TAKEN]
        _undelivered.extend(parcel for parcel in self._parcels if parcel.memory[0] != _TAKEN)

    # -- receiving ----------------------------------------------------------------

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_secs: float) -> ReceiveWork:
        """Post a receive into a tensor."""
        self._meeting.check_open()
        work = ReceiveWork(self, tensor, source, tag, timeout_secs)
        with self._mutex:
            self._posted.append(work)
        return work

    def wait_for(self, work: ReceiveWork, deadline: float) -> None:
        """Deliver until this receive is done. The group is closed if it takes too long."""
        if not self.wait_awhile_for(work, deadline):
            waiter, others = self._meeting.waiter, self._meeting.roster.others
            waiter.give_up(lambda: self.words_of(work), others if work.source < 0 else [work.source])

    def wait_awhile_for(self, work: ReceiveWork, deadline: float) -> bool:
        """Deliver until this receive is done, or until the deadline: then False."""
        return self._is_done_by(
            deadline, lambda: LocalWork.is_completed(work), work.source, lambda: self.words_of(work)
        )

    def words_of(self, work: ReceiveWork) -> str:
        """The receive in words."""
        return f"recv(from {self._name(work.source)}, tag {work.tag})"

    def blamed_for(self, work: ReceiveWork) -> list[int]:
        """The ranks, of the world, that the receive waits for."""
        roster = self._meeting.roster
        return roster.global_ranks(roster.others if work.source < 0 else [work.source])

    def deliver(self) -> None:
        """Take every note out of the rings, and hand each letter to the receive that waits for it."""
        with self._mutex:
            for source in range(self._meeting.size):
                self._empty_ring(source)
            for letter in list(self._letters):
                work = next((work for work in self._posted if work.matches(letter)), None)
                if work is not None:
                    self._letters.remove(letter)
                    self._posted.remove(work)
                    self._hand_over(letter, work)

    def _empty_ring(self, source: int) -> None:
        ring = self._ring(source, self._meeting.rank)
        counters = ring[:_NOTES_AT].cast("Q")
        pid = self._meeting.roster.members[source].pid
        while (num_notes := counters[_HEAD_AT // 8] - counters[_TAIL_AT // 8]) > 0:
            if num_notes > _RING_NOTES:
                raise TamperedError(
                    f"{self._meeting.roster.name(source)} has counted {num_notes} messages in a ring that "
                    f"holds {_RING_NOTES}. None was read. A program of this user wrote into the group's "
                    "shared memory."
                )
            at = _NOTES_AT + (counters[_TAIL_AT // 8] % _RING_NOTES) * _NOTE_BYTES
            tag, numel, segment_id, num_bytes, inode, fd, dtype = _NOTE.unpack_from(ring, at)
            counters[_TAIL_AT // 8] += 1
            self._board.ring(source)
            parcel = SegmentName(pid, fd, segment_id, num_bytes, inode)
            self._letters.append(_Letter(source, tag, numel, dtype, parcel))

    def _hand_over(self, letter: _Letter, work: ReceiveWork) -> None:
        taken: mmap.mmap | None = None
        try:
            sender = self._meeting.roster.members[letter.source].global_rank
            parcel = self._mapped.get(letter.parcel, sender)
            flat, taken = work.tensor, parcel.memory
            if (letter.numel, letter.dtype) != (flat.numel(), dtype_number(flat.dtype)):
                raise DesyncError(
                    f"recv: rank {sender} sent {letter.numel} elements with tag {letter.tag}; this tensor "
                    f"has {flat.numel()} of {flat.dtype}. Make shapes and dtypes equal.",
                    [sender],
                )
            num_bytes = flat.numel() * flat.element_size()
            payload = part_of(parcel.tensor, _PARCEL_HEADER_BYTES, num_bytes, sender).view(flat.dtype)
            with torch.inference_mode():
                flat.detach().copy_(payload.view(flat.shape))
            work.found_source = letter.source
        except BaseException as error:
            work.finish(error)
        else:
            work.finish()
        if taken is not None:
            taken[0] = _TAKEN  # also one that did not fit: its sender may use the memory again

    # -- waiting ------------------------------------------------------------------

    def _is_done_by(
        self, deadline: float, is_done: Callable[[], bool], peer: int, what: Callable[[], str]
    ) -> bool:
        """Deliver and sleep in turns until `is_done`, or until the deadline: then False."""
        while True:
            seen = self._board.bell(self._meeting.rank)
            # Looked at before delivering: what a rank sent before it left still counts.
            has_left = peer >= 0 and self._board.state(peer) == RankState.LEFT
            self.deliver()
            if is_done():
                return True
            needed = {peer} if has_left else set[int]()
            self._meeting.waiter.check_peers(what, needed.__contains__)
            if time.monotonic() > deadline:
                return False
            self._board.sleep_on_bell(seen, TICK_SECS)

    def _ring(self, source: int, target: int) -> memoryview:
        start = (source * self._meeting.size + target) * _RING_BYTES
        return self._rings[start : start + _RING_BYTES]

    def _name(self, peer: int) -> str:
        return "anyone" if peer < 0 else self._meeting.roster.name(peer)
