"""Messages that nobody waits for: they go with the next one to their peer, or soon.

To wake a worker costs more than to send it a message. So what only has to be known some time travels with
what wakes it anyway. What may be known after that goes behind it, so that nobody waits until it is heard.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from weft.errors import PeerError
from weft.rpc.links import Links
from weft.rpc.peers import Peer, Write
from weft.rpc.ring import Part

logger = logging.getLogger(__name__)
SOON_SECS = 0.001
SOME_TIME_SECS = 0.02


class Later:
    """Such messages of one worker. `note(deadline)` has `send_due` called at a time."""

    def __init__(self, links: Links, note: Callable[[float], None]) -> None:
        self._links = links
        self._note = note
        self._lock = threading.Lock()
        self._due: dict[Peer, float] = {}  # when what waits for a peer has to go

    def add(self, peer: Peer, write: Write, secs: float, *, is_behind: bool = False) -> None:
        """Send a message with the next one to that peer, before it or behind it, or after so many seconds.

        It is written when it goes: behind another one, nobody waits for that.
        """
        due = time.monotonic() + secs
        with self._lock:
            is_alone = not peer.deferred and not peer.trailing  # what was due before has gone with another
            (peer.trailing if is_behind else peer.deferred).append(write)
            due = self._due[peer] = due if is_alone else min(due, self._due.get(peer, due))
        self._note(due)

    def send_before(self, peer: Peer) -> None:
        """Send what goes before the next message, which wakes the peer."""
        self._send(peer, _take_all(peer.deferred), is_answer=True, is_quiet=True)

    def send_behind(self, peer: Peer, parts: Sequence[Part], *, is_answer: bool) -> None:
        """Send a message, and what goes behind it. Raises PeerError when the link is closed."""
        messages = _take_all(peer.trailing)
        try:
            self._links.send(peer.info.id, parts, is_answer=is_answer)
        except BaseException:
            self._put_back(peer, messages)
            raise
        # The peer has just been woken. Where it does not look again, it does so after a nap.
        self._send(peer, messages, is_answer=is_answer, is_quiet=True)

    def _put_back(self, peer: Peer, messages: Sequence[Write]) -> None:
        """Let messages that were to go behind another go later."""
        if not messages:
            return
        with self._lock:
            peer.trailing.extendleft(reversed(messages))
            due = self._due.setdefault(peer, time.monotonic() + SOME_TIME_SECS)
        self._note(due)

    def _send(self, peer: Peer, messages: list[Write], *, is_answer: bool, is_quiet: bool) -> None:
        """Send messages; the last wakes the peer, unless another one does."""
        for place, write in enumerate(messages, 1):
            is_hushed = is_quiet or place < len(messages)
            try:
                self._links.send(peer.info.id, write(), is_answer=is_answer, is_quiet=is_hushed)
            except PeerError:
                return  # it is gone
            except Exception:  # the message that it goes with was sent all the same
                logger.exception("weft.rpc: a notice to %s was not sent", peer.info)

    def send_due(self, now: float) -> float:
        """Send what has waited long enough; when the next of it has."""
        with self._lock:
            peers = [peer for peer, due in self._due.items() if due <= now]
            for peer in peers:
                del self._due[peer]
            next_due = min(self._due.values(), default=float("inf"))
        for peer in peers:
            messages = [*_take_all(peer.deferred), *_take_all(peer.trailing)]
            self._send(peer, messages, is_answer=True, is_quiet=False)
        return next_due


def _take_all(waiting: deque[Write]) -> list[Write]:
    """What waits, taken out. Another thread may do the same: each message goes to one of them."""
    taken: list[Write] = []
    try:
        while waiting:
            taken.append(waiting.popleft())
    except IndexError:
        pass
    return taken
