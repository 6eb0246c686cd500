"""Wait for the other ranks, and say who is to blame when they don't come.

A wait ends in one of three ways: everyone arrived; a rank died, left or failed
(PeerError, within a tenth of a second); or time ran out (PeerTimeoutError, naming
the ranks that had not arrived). Whoever gives up says so on the board, so that
every other rank of the group gives up too, for the same reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from weft.errors import PeerError, PeerTimeoutError
from weft.local import kernel
from weft.local.board import Board, RankState, Reason
from weft.local.roster import Roster

# How long a sleeper sleeps before it looks whether its peers still live.
TICK_SECS = 0.1
# How often a waiter yields its core before it sleeps: about 100 microseconds. A peer
# that computes its share of the same collective arrives within that.
_YIELDS = 150
_LOOKS_FOR_CAUSE = 10


class Waiter:
    """Waits for phases of the board on behalf of one rank."""

    def __init__(self, board: Board, roster: Roster, group_name: str) -> None:
        self._board = board
        self._roster = roster
        self._group_name = group_name
        # With more ranks than cores a yielding rank only keeps a core from a working one.
        self._yields = _YIELDS if roster.size <= len(os.sched_getaffinity(0)) else 0

    def wait_for_all(self, phase: int, what: Callable[[], str], deadline: float | None) -> None:
        """Return when every rank has reached `phase`. `what` names the call, for errors."""
        for peer in self._roster.others:
            if self._board.phase(peer) < phase:
                self._wait_for(peer, phase, what, deadline)

    def _wait_for(self, peer: int, phase: int, what: Callable[[], str], deadline: float | None) -> None:
        board = self._board
        for _ in range(self._yields):
            if board.phase(peer) >= phase:
                return
            kernel.yield_core()
        while (seen := board.phase(peer)) < phase:
            self.check_peers(what, lambda other: board.phase(other) < phase)
            late = [other for other in self._roster.others if board.phase(other) < phase]
            if deadline is not None and late and time.monotonic() > deadline:
                self.give_up(what, late)
            board.sleep_on_phase(peer, seen, TICK_SECS)

    def check_peers(self, what: Callable[[], str], is_needed: Callable[[int], bool]) -> None:
        """Raise PeerError if a rank died or failed, or left while it is still needed.

        Whether it is needed is asked after it was seen to have left: it may have arrived
        just before it did.
        """
        roster, board = self._roster, self._board
        if board.state(roster.rank) == RankState.FAILED:  # another thread of this rank gave up
            self._fail(board.reason(roster.rank), what)
        for peer in roster.others:
            if roster.is_dead(peer) and board.state(peer) in (RankState.ABSENT, RankState.OPEN):
                words = f"{roster.name(peer)} (pid {roster.members[peer].pid}) died"
                self._fail(Reason(words, (peer,)), what)
        for peer in roster.others:
            state = board.state(peer)
            if state == RankState.FAILED:
                reason = board.reason(peer)
                if reason.blamed == (peer,):  # it speaks of itself; others' words are passed on as they are
                    reason = reason._replace(words=f"{roster.name(peer)} gave up: {reason.words}")
                self._fail(reason, what)
            if state == RankState.LEFT and is_needed(peer):
                self._fail(Reason(f"{roster.name(peer)} has left the group", (peer,)), what)

    def find_cause(self, what: Callable[[], str]) -> None:
        """Raise PeerError for a peer whose memory was gone in the middle of a collective.

        A process that ends loses its memory a moment before its lock, so look for a while.
        Returns if nobody is found to be dead, gone or failed.
        """
        rank = self._roster.rank
        for _ in range(_LOOKS_FOR_CAUSE):
            self.check_peers(what, lambda _: True)
            self._board.sleep_on_phase(rank, self._board.phase(rank), TICK_SECS)

    def give_up(self, what: Callable[[], str], late: Sequence[int]) -> None:
        """Raise PeerTimeoutError: these ranks did not come in time."""
        roster = self._roster
        who = "; ".join(f"{roster.name(peer)} ({roster.condition(peer)})" for peer in late)
        words = f"{roster.names(late)} had not arrived at {what()} when the timeout passed"
        self._board.set_state(RankState.FAILED, Reason(words, tuple(late), is_timeout=True))
        raise PeerTimeoutError(
            f"{roster.name(roster.rank)} waited past the timeout in {what()} of {self._group_name}. "
            f"Not arrived: {who}. Look at what these ranks do, or raise the timeout.",
            roster.global_ranks(late),
        )

    def _fail(self, reason: Reason, what: Callable[[], str]) -> None:
        roster = self._roster
        if self._board.state(roster.rank) != RankState.FAILED:
            self._board.set_state(RankState.FAILED, reason)
        raise closed_by(
            reason,
            f"{roster.name(roster.rank)} can't finish {what()} of {self._group_name}: {reason.words}",
            roster,
        )


def closed_by(reason: Reason, happened: str, roster: Roster) -> PeerError:
    """The error of a rank whose group was closed for this reason."""
    kind = PeerTimeoutError if reason.is_timeout else PeerError
    return kind(
        f"{happened}. The group is closed; destroy it and make a new one with the ranks that live.",
        roster.global_ranks(reason.blamed),
    )
