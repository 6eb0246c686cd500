"""Messages that nobody waits for: they go with the next one to their peer, or soon.

To wake a worker costs more than to send it a message. So what only has to be known some time travels with
what wakes it anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft.errors import PeerError
from weft.rpc.links import Links
from weft.rpc.peers import Peer
from weft.rpc.wire import Message, encode_message

SOON_SECS = 0.001
SOME_TIME_SECS = 0.02


class Later:
    """Such messages of one worker. `note(deadline)` has `send_due` called at a time."""

    def __init__(self, links: Links, note: Callable[[float], None]) -> None:
        self._links = links
        self._note = note
        self._lock = threading.Lock()
        self._due: dict[Peer, float] = {}  # when what waits for a peer has to go

    def add(self, peer: Peer, message: Message, secs: float) -> None:
        """Send a message with the next one to that peer, or after so many seconds."""
        due = time.monotonic() + secs
        with self._lock:
            is_alone = not peer.deferred  # what was due before has gone with another message
            peer.deferred.append(encode_message(message))
            due = self._due[peer] = due if is_alone else min(due, self._due.get(peer, due))
        self._note(due)

    def send(self, peer: Peer, *, is_quiet: bool) -> None:
        """Send what there is for a peer; quietly, where the next message wakes it anyway."""
        try:
            while peer.deferred:
                self._links.send(peer.info.id, peer.deferred.popleft(), is_answer=True, is_quiet=is_quiet)
        except (IndexError, PeerError):
            return  # another thread has sent it, or the peer is gone

    def send_due(self, now: float) -> float:
        """Send what has waited long enough; when the next of it has."""
        with self._lock:
            peers = [peer for peer, due in self._due.items() if due <= now]
            for peer in peers:
                del self._due[peer]
            next_due = min(self._due.values(), default=float("inf"))
        for peer in peers:
            self.send(peer, is_quiet=False)
        return next_due
