"""Messages that nobody waits for: they go with the next one to their peer, or soon.

To wake a worker costs more than to send it a message. So what only has to be known some time travels with
what wakes it anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.errors import PeerError
from weft.rpc.links import Links
from weft.rpc.peers import Peer
from weft.rpc.wire import Message, encode_message

SOON_SECS = 0.001
SOME_TIME_SECS = 0.02


class Later:
    """Such messages of one worker. `note(deadline)` has `send_all` called at a time."""

    def __init__(self, links: Links, note: Callable[[float], None]) -> None:
        self._links = links
        self._note = note
        self._peers: set[Peer] = set()

    def add(self, peer: Peer, message: Message, secs: float) -> None:
        """Send a message with the next one to that peer, or after so many seconds."""
        peer.deferred.append(encode_message(message))
        self._peers.add(peer)
        self._note(time.monotonic() + secs)

    def send(self, peer: Peer, *, is_quiet: bool) -> None:
        """Send what there is for a peer; quietly, where the next message wakes it anyway."""
        try:
            while peer.deferred:
                self._links.send(peer.info.id, peer.deferred.popleft(), is_answer=True, is_quiet=is_quiet)
        except (IndexError, PeerError):
            return  # another thread has sent it, or the peer is gone

    def send_all(self) -> None:
        """Send what has waited long enough."""
        while self._peers:
            self.send(self._peers.pop(), is_quiet=False)
