"""What an agent knows of another worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from weft.errors import PeerError, PeerTimeoutError
from weft.rpc.tensors import Route
from weft.rpc.workers import Card, WorkerInfo

if TYPE_CHECKING:
    from weft.rpc.calls import Call

Blocking = Callable[[], AbstractContextManager[None]]
Write = Callable[[], Sequence[bytes | memoryview]]  # the parts of a message


class Peer:
    """Another worker (or this one, for calls to itself): how to reach it, and whether it is still there."""

    def __init__(self, card: Card, calling: Route, replying: Route) -> None:
        self.card = card
        self.info: WorkerInfo = card.info
        self.calling = calling  # how tensors of calls travel to it
        self.replying = replying  # how tensors of answers to its calls do
        self.lost: str | None = None  # why it can't be reached any more
        self.has_left = False  # it said so, and is not to blame
        self.was_reached = True
        self.is_linked = False  # that it was opened, once
        self.was_told = False  # that this worker has given it up
        self.deferred: deque[Write] = deque()  # messages that go before the next one
        self.trailing: deque[Write] = deque()  # and right behind it
        self._in_flight = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._num_waiting = 0  # for room

    def lose(self, why: str, *, has_left: bool = False) -> bool:
        """Note that the worker is gone; False when that was known."""
        with self._room:
            if self.lost is not None:
                return False
            self.has_left = has_left
            self.lost = why
            self._room.notify_all()
            return True

    def lost_error(self, what: str) -> PeerError:
        """What a caller sees who needs this worker."""
        if not self.was_reached:
            return self.gone_error(what)
        return PeerError(
            f"worker '{self.info.name}' (id {self.info.id}) is gone: {self.lost}. {what} got no answer from "
            "it; it may or may not have run there.",
            [self.info.id],
        )

    def gone_error(self, what: str) -> PeerError:
        """What a caller sees who asks this worker after it went."""
        why = self.lost or "its process ended, or the network to it broke"
        return PeerError(
            f"worker '{self.info.name}' (id {self.info.id}) is gone: {why}. {what} was not sent.",
            [self.info.id],
        )

    def enter(self, limit: int, call: Call, blocking: Blocking) -> None:
        """Count a call in; waits while `limit` calls have no answer. Raises when none comes in time."""
        with self._lock:
            if self._in_flight >= limit and self.lost is None:
                timeout_secs = call.timeout_secs
                self._num_waiting += 1
                try:
                    with blocking():
                        is_room = self._room.wait_for(
                            lambda: self._in_flight < limit or self.lost is not None, timeout_secs or None
                        )
                finally:
                    self._num_waiting -= 1
                if not is_room:
                    raise PeerTimeoutError(
                        f"RPC ran for more than set timeout ({timeout_secs * 1000:g} ms) and will now be "
                        f"marked with an error: {call.what} was not sent, since {limit} calls to worker "
                        f"'{self.info.name}' (id {self.info.id}) have no answer yet (max_in_flight). Wait "
                        "for some of them first.",
                        [self.info.id],
                    )
            self._in_flight += 1

    def leave(self) -> None:
        """Count a call out."""
        with self._lock:
            self._in_flight -= 1
            if self._num_waiting:
                self._room.notify()
