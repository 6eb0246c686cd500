"""Who the ranks of a local group are, and whether they still live.

Each process rank holds a record lock on its byte of the board's file. The kernel
drops the lock the moment the process ends, however it ends; a fork doesn't carry
it, and no process id is reused by mistake. So a rank is dead when its lock is free.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from weft.comm.desync import odd_ones
from weft.local.segment import SegmentName, open_segment_file

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group."""

    global_rank: int
    pid: int
    is_reachable: bool = False  # by us, with cross-memory copies from it and to it
    is_thread_here: bool = False  # a sister thread of this process


class Roster:
    """The members of a group, as one of them sees them."""

    def __init__(self, rank: int, members: Sequence[Member]) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.size = len(members)
        self.others = tuple(peer for peer in range(self.size) if peer != rank)
        self._lock_fd: int | None = None

    def lock_own_byte(self, board: SegmentName) -> None:
        """Show that this process lives, until it ends or `unlock` is called.

        From here on no other descriptor of the board's file may be closed in this
        process: the kernel would drop the lock with it.
        """
        self._lock_fd = open_segment_file(board, self.members[0].global_rank)
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)

    def unlock(self) -> None:
        """Stop showing that this process lives."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def is_dead(self, peer: int) -> bool:
        """Whether the peer's process has ended."""
        if self._lock_fd is None or self.members[peer].is_thread_here:
            return False
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, peer, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._lock_fd, fcntl.F_GETLK, query))
        return answer[0] == fcntl.F_UNLCK

    def global_ranks(self, peers: Sequence[int]) -> list[int]:
        """The peers as ranks of the world."""
        return [self.members[peer].global_rank for peer in peers]

    def name(self, peer: int) -> str:
        """How messages call the peer."""
        return f"rank {self.members[peer].global_rank}"

    def names(self, peers: Sequence[int]) -> str:
        """How messages call several peers."""
        ranks = sorted(self.members[peer].global_rank for peer in peers)
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

    def odd_ones(self, told: Sequence[object]) -> list[int]:
        """The ranks, of the world, that say something else than most."""
        return odd_ones([member.global_rank for member in self.members], told)

    def condition(self, peer: int) -> str:
        """A word on a peer that is late: stopped by a signal, or running."""
        member = self.members[peer]
        if member.is_thread_here:
            return "a thread of this process"
        try:
            with open(f"/proc/{member.pid}/stat", "rb") as stat:
                state = stat.read().rsplit(b")", 1)[1].split()[0]
        except OSError:
            return f"pid {member.pid}, gone"
        return f"pid {member.pid}, " + ("stopped by a signal" if state in (b"T", b"t") else "alive")
