"""One collective, as the ranks live it: meet, do your share, part.

    meet   post what you call and where your tensor lies; wait for everyone; compare
    share  read and write the peers' windows (algorithms in reduce.py and move.py)
    part   wait until everyone has done their share, so that no memory is reused early

Invariant: either every rank of the group passes `meet`, or every rank raises: a
DesyncError on all of them when their calls differ (the group stays usable), a
PeerError when a rank is dead, gone or late (the group is closed).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch

from weft.errors import DesyncError, InternalError, PeerError, StateError
from weft.local.arithmetic import REDUCE_NAME
from weft.local.board import Board, Place, PlaceKind, RankState, Reason, Signature
from weft.local.calls import Op, describe, dtype_number
from weft.local.memory import Memory, Share
from weft.local.roster import Roster
from weft.local.segment import MappedSegments
from weft.local.waiting import Waiter, closed_by
from weft.local.windows import Window

_NOWHERE = Place(PlaceKind.NOWHERE)
# Tensors of collectives that failed here while peers might still read or write them. A
# freed one could by then hold something else, so they stay for as long as the process.
_abandoned: list[torch.Tensor] = []


class Call(NamedTuple):
    """What one rank calls: the part that must agree, and its own."""

    op: Op
    dtype: torch.dtype | None = None
    numel: int = -1  # -1 where ranks may differ
    reduce_number: int = 0
    root: int = -1
    factor: float = 1.0
    may_inline: bool = True  # sizes agree, so all ranks inline or none does
    is_written: bool = False  # peers write into this rank's window
    own: Share = (0, 0)  # elements that no peer reads or writes


class Meeting:
    """The meetings of one group, one after another."""

    def __init__(self, board: Board, roster: Roster, segments: MappedSegments, group_name: str) -> None:
        self.rank = roster.rank
        self.size = roster.size
        self.board = board
        self.roster = roster
        self._group_name = group_name
        self.waiter = Waiter(board, roster, group_name)
        self._segments = segments
        self._num_freed = [0] * roster.size  # of each rank's segments, as far as we have heard
        self._pid = os.getpid()
        self._number = 0
        self._closed: str | None = None

    def check_open(self) -> None:
        """Raise if the group was left or has failed."""
        if os.getpid() != self._pid:
            raise StateError(
                f"{self._group_name} was made before this process was forked from rank "
                f"{self.roster.members[self.rank].global_rank}; only its maker can use it."
            )
        if self._closed is not None:
            raise StateError(f"{self._group_name} is closed: {self._closed}. Make a new group.")
        if self.board.state(self.rank) == RankState.FAILED:
            reason = self.board.reason(self.rank)
            raise closed_by(reason, f"{self._group_name} can't be used: {reason.words}", self.roster)

    def meet(self, call: Call, memory: Memory, tensor: torch.Tensor | None, timeout_secs: float) -> Round:
        """Expose this rank's flat tensor, wait for everyone, and open their windows."""
        self.check_open()
        number, slot = self._number, self._number & 1
        dtype = 0 if call.dtype is None else dtype_number(call.dtype, memory.device_number)
        board = self.board
        signature = board.pack(call.op, call.reduce_number, dtype, call.root, call.numel, number)
        round_ = Round(self, call, memory, tensor, number, time.monotonic() + timeout_secs)
        try:
            place = _NOWHERE
            if tensor is not None:
                place = memory.expose(tensor, slot, call.own, may_inline=call.may_inline)
            if call.factor != 1.0 or memory.gpu:
                place = place._replace(factor=call.factor, gpu=memory.gpu)
            board.post(slot, signature, place)
            # Counted only now: a call that could not even be posted changed nothing.
            self._number += 1
            memory.finish_writes()
            phase = board.advance()
            self.waiter.wait_for_all(phase, round_.words, round_.deadline)
        except BaseException as error:
            self.abandon(tensor, error, round_.words)
            raise
        for peer in self.roster.others:
            if board.state(peer) == RankState.FAILED and not (round_.is_inline and board.phase(peer) > phase):
                # It has given up this very collective, and not a later one.
                self.abandon(tensor, None, round_.words)
                self.waiter.check_peers(round_.words, lambda _: False)
            if board.num_freed(peer) != self._num_freed[peer]:
                self._drop_freed(peer)
            if not board.same_call(peer, slot, signature):
                raise DesyncError(self._differences(slot), self._odd_ones(slot))
        if memory.gpu:
            memory.learn_gpus([board.place(peer, slot).gpu for peer in range(self.size)])
        return round_

    def abandon(
        self, tensor: torch.Tensor | None, error: BaseException | None, words: Callable[[], str]
    ) -> None:
        """Give a collective up that peers may still work on: close the group, keep its memory.

        Raises the real cause where a peer's memory could not be reached since it has ended.
        """
        if tensor is not None:
            _abandoned.append(tensor)
        if error is None or self.board.state(self.rank) == RankState.FAILED:
            return
        if isinstance(error, PeerError):
            self.waiter.find_cause(words)
        self.fail(f"{type(error).__name__} in {words()}: {error}")

    def _drop_freed(self, peer: int) -> None:
        """Unmap what the peer has given back."""
        freed = self.board.freed_since(peer, self._num_freed[peer])
        self._num_freed[peer] = self.board.num_freed(peer)
        self._segments.drop(self.roster.members[peer].pid, freed)

    def _differences(self, slot: int) -> str:
        calls = "; ".join(
            f"{self.roster.name(peer)} calls {describe(self.board.signature(peer, slot), REDUCE_NAME)}"
            for peer in range(self.size)
        )
        return (
            f"the ranks of {self._group_name} call different things: {calls}. No data was moved. Make every "
            "rank call the same collectives in the same order, with equal shapes and dtypes; "
            "WEFT_DESYNC_CHECK=1 names the lines of code."
        )

    def _odd_ones(self, slot: int) -> list[int]:
        return self.roster.odd_ones([self.board.signature(peer, slot) for peer in range(self.size)])

    def late_ranks(self) -> list[int]:
        """The ranks, of the world, that have not come as far as this one."""
        here = self.board.phase(self.rank)
        return self.roster.global_ranks(
            [peer for peer in self.roster.others if self.board.phase(peer) < here]
        )

    def fail(self, reason: str) -> None:
        """Close the group for every rank, for this reason. The first reason stays."""
        if self.board.state(self.rank) != RankState.FAILED:
            self.board.set_state(RankState.FAILED, Reason(reason, (self.rank,)))

    def leave(self, why: str) -> None:
        """Say that this rank takes part no more."""
        if self._closed is None:
            self._closed = why
            if self.board.state(self.rank) != RankState.FAILED:
                self.board.set_state(RankState.LEFT)


class Round:
    """One collective after its `meet`. A context: leaving it parts the ranks."""

    __slots__ = ("_meeting", "_memory", "_number", "_slot", "call", "deadline", "is_inline", "tensor")

    def __init__(
        self,
        meeting: Meeting,
        call: Call,
        memory: Memory,
        tensor: torch.Tensor | None,
        number: int,
        deadline: float,
    ) -> None:
        self._meeting = meeting
        self._memory = memory
        self._number = number
        self._slot = number & 1
        self.deadline = deadline
        self.call = call
        self.tensor = tensor
        # Whether every tensor of the round lies in the board's inline buffers. Sizes
        # agree in such a call, so every rank answers the same.
        self.is_inline = call.may_inline and memory.is_inline(call.numel, call.dtype)

    def words(self) -> str:
        """The call in words."""
        call = self.call
        dtype = 0 if call.dtype is None else dtype_number(call.dtype, self._memory.device_number)
        signature = Signature(call.op, call.reduce_number, dtype, call.root, call.numel, self._number)
        return describe(signature, REDUCE_NAME)

    def place(self, peer: int) -> Place:
        """Where the peer's tensor lies."""
        return self._meeting.board.place(peer, self._slot)

    def window(self, peer: int, dtype: torch.dtype, numel: int) -> Window:
        """The peer's tensor, of `numel` elements."""
        return self._memory.window(peer, self.place(peer), dtype, numel, self._slot)

    def windows(self, numel: int) -> list[Window | None]:
        """Every rank's window by rank, and None for this rank."""
        dtype = self.call.dtype
        if dtype is None:
            raise InternalError(f"{self.words()}: no dtype, so no windows")
        rank = self._meeting.rank
        return [
            None if peer == rank else self.window(peer, dtype, numel) for peer in range(self._meeting.size)
        ]

    def factors(self) -> list[float]:
        """Every rank's factor by rank."""
        return [self.place(peer).factor for peer in range(self._meeting.size)]

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._meeting.abandon(self.tensor, error, self.words)
            return
        if self.is_inline:
            return  # the peers read our inline buffer, which we don't touch before the next meeting
        self._memory.finish_writes()
        meeting = self._meeting
        try:
            meeting.waiter.wait_for_all(meeting.board.advance(), self.words, self.deadline)
        except BaseException as failure:
            meeting.abandon(self.tensor, failure, self.words)
            raise
        if self.call.is_written and self.tensor is not None:
            self._memory.settle(self.tensor, self.call.own)
