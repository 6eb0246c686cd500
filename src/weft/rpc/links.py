"""Links: how messages get from one worker to another.

zmq carries them, and CURVE keeps strangers out: a link is up when its peer has proved the secret. Workers of
one host then go on through a ring in shared memory, which takes a third of the time; their zmq link stays,
and tells when one dies.

What one worker sends to another arrives in order, once, or the link is lost for good: a link that broke is
never opened again, since nobody could tell which messages had arrived.

`send` may be called from any thread and never waits. `take` is called by one thread at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from weft.errors import PeerError, StateError
from weft.local.segment import SegmentName
from weft.rpc.bell import Bell, open_bell, own_bell
from weft.rpc.frames import split_parts
from weft.rpc.inbox import MAX_FRAME_BYTES, Inbox
from weft.rpc.ring import Part, RingReader, RingWriter
from weft.rpc.secret import Keys
from weft.rpc.watching import CONNECT_SECS, Watch

logger = logging.getLogger(__name__)
# Between hosts only silence tells of a death that no packet tells of.
_HEARTBEAT_MS = 400
_SILENCE_MS = 1200
_GOODBYE_MS = 500  # for what is still on its way out when a worker leaves


class Link:
    """The way to one peer."""

    def __init__(self, peer_id: int, socket: zmq.Socket[bytes]) -> None:
        self.peer_id = peer_id
        self.socket = socket
        self.lock = threading.Lock()  # a zmq socket and a ring are for one thread at a time
        self.gives_up_at = time.monotonic() + CONNECT_SECS
        self.is_up = False
        self.why: str | None = None  # it was lost
        self.is_closed = False
        self.offered: RingWriter | None = None
        self._ring: RingWriter | None = None
        self._bell: Bell | None = None
        self._waiting: deque[list[bytes]] = deque()  # for room in the ring

    def send(self, parts: Sequence[Part], is_answer: bool, is_quiet: bool) -> bool:
        """Send one message; False when it waits for room. Raises PeerError when the link is closed."""
        with self.lock:
            if self.is_closed:
                raise PeerError(f"the link to worker {self.peer_id} is closed.", [self.peer_id])
            if self._ring is None or self._bell is None:
                self.socket.send_multipart(split_parts(parts))
                return True
            is_written = not self._waiting and self._ring.write(parts)
            if not is_written:
                self._waiting.append([bytes(part) for part in parts])
            if not is_quiet:
                self._bell.ring(is_answer=is_answer)
            return is_written

    def flush(self) -> bool:
        """Send what waits for room, as far as there is some; True when nothing is left."""
        with self.lock:
            while self._waiting and self._ring is not None and not self.is_closed:
                if not self._ring.write(self._waiting[0]):
                    return False
                self._waiting.popleft()
                if self._bell is not None:
                    self._bell.ring()
            return True

    def switch(self, bell: Bell, last: Sequence[Part]) -> None:
        """Go over to the ring; `last` is what still goes the old way, and says so."""
        with self.lock:
            if not self.is_closed:
                self.socket.send_multipart(last)
                self._ring, self._bell = self.offered, bell

    def wait_read(self, secs: float) -> None:
        """Wait until the peer has what lies in this worker's memory alone."""
        deadline = time.monotonic() + secs
        while not self.is_closed and self._ring is not None and self._ring.has_spilled:
            if time.monotonic() > deadline:
                return
            threading.Event().wait(0.002)

    def close(self, linger_ms: int) -> None:
        """Close the socket; its monitor then stops too."""
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.socket.close(linger=linger_ms)


class Links:
    """All links of one worker.

    `on_lost(peer_id, why, was_up)` is called once a lost link, on the watching thread.
    """

    def __init__(
        self, own_id: int, keys: Keys, listen: str | None, on_lost: Callable[[int, str, bool], None]
    ) -> None:
        self._own_id = own_id
        self._keys = keys
        self._on_lost = on_lost
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self.is_closing = False
        self.bell = own_bell(own_id)
        self._mail: deque[Sequence[Part]] = deque()  # what came by zmq, and from this worker itself
        self._accepted: dict[int, RingReader] = {}
        self._readers: list[RingReader] = []
        self._readers_lock = threading.Lock()
        try:
            inbox = Inbox(self._context, keys, listen)
            self.local_address, self.remote_address = inbox.local_address, inbox.remote_address
            self._watch = Watch(self._context, keys.public, inbox, self.put_mail, self._lose)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def open(self, peer_id: int, address: str) -> None:
        """Begin to connect to a peer. What is sent meanwhile goes when the link is up."""
        with self._lock:
            if self.is_closing:
                raise StateError("this worker is shutting down.")
            socket = self._make_socket(address)
            link = Link(peer_id, socket)
            self._watch.add(link)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                link.close(0)
                raise PeerError(
                    f"worker {peer_id} can't be reached at {address!r} ({error}).", [peer_id]
                ) from error
            self._links[peer_id] = link

    def _make_socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)  # agents limit the calls that are under way; a link must not block
        socket.curve_serverkey = self._keys.public
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(
            zmq.MAXMSGSIZE, MAX_FRAME_BYTES
        )  # another process may have the peer's address by now
        if address.startswith("tcp"):
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECS * 1000))
        return socket

    def send_last(self, address: str, parts: Sequence[Part]) -> None:
        """Send one message to a worker whose link is lost, on a link of its own. It may not arrive."""
        with self._lock:
            if not self.is_closing:
                socket = self._make_socket(address)
                socket.connect(address)
                socket.send_multipart(split_parts(parts))
                socket.close(linger=_GOODBYE_MS)

    def wait_up(self, peer_id: int) -> str | None:
        """Wait until a peer has proved the secret; None then, else why it has not."""
        link = self._links[peer_id]
        while not link.is_up and link.why is None:
            threading.Event().wait(0.001)
        return None if link.is_up else link.why

    def is_open(self, peer_id: int) -> bool:
        """Whether there is a link to the peer."""
        link = self._links.get(peer_id)
        return link is not None and not link.is_closed

    def send(
        self, peer_id: int, parts: Sequence[Part], *, is_answer: bool = False, is_quiet: bool = False
    ) -> None:
        """Send one message; quietly, where another one wakes the peer, or it need not be heard soon.

        Raises PeerError when the link is closed; never waits.
        """
        if peer_id == self._own_id:
            self.put_mail([bytes(part) for part in parts])
            return
        link = self._links.get(peer_id)
        if link is None:
            raise PeerError(f"there is no link to worker {peer_id}.", [peer_id])
        if not link.send(parts, is_answer, is_quiet):
            self._watch.flush_soon(link)

    def put_mail(self, parts: Sequence[Part]) -> None:
        """Have a message taken."""
        self._mail.append(parts)
        self.bell.ring()

    def has_mail(self) -> bool:
        """Whether there is a message to take."""
        if self._mail:
            return True
        return any(map(RingReader.has_mail, self._readers))

    def take(self) -> Sequence[Part] | None:
        """The next message from any peer, if there is one. One thread at a time."""
        if self._mail:
            return self._mail.popleft()
        for place, reader in enumerate(self._readers):
            try:
                parts = reader.read()
            except Exception:
                # Its writer broke the rules of the ring: nothing after that can be trusted.
                logger.exception("weft.rpc: the ring of worker %d can't be read", reader.peer_id)
                self._lose(self._links[reader.peer_id], "its messages can't be read")
                self.drop(reader.peer_id)
                return None
            if parts is not None:
                # The next look begins with the others, so that one peer can't crowd them out.
                if len(self._readers) > 1 and reader.has_mail():
                    with self._readers_lock:
                        self._readers = [*self._readers[place + 1 :], *self._readers[: place + 1]]
                return parts
        return None

    # Rings

    def offer_ring(self, peer_id: int) -> SegmentName:
        """Make the ring to a peer of this host; the peer opens it by its name."""
        link = self._links[peer_id]
        link.offered = RingWriter(self._own_id, peer_id)
        return link.offered.name

    def accept_ring(self, peer_id: int, name: SegmentName) -> bool:
        """Open the ring that a peer offers; False where this system does not let it."""
        try:
            self._accepted[peer_id] = RingReader(name, peer_id, self._own_id)
        except (PeerError, StateError, OSError):
            return False
        return True

    def write_ring(self, peer_id: int, bell_name: SegmentName, last: Sequence[Part]) -> None:
        """Send through the ring from now on, since the peer has opened it."""
        self._links[peer_id].switch(open_bell(bell_name, peer_id, self._own_id), last)

    def read_ring(self, peer_id: int) -> None:
        """Receive from a peer's ring: all that it sent before has been received."""
        with self._readers_lock:
            reader = self._accepted.pop(peer_id, None)
            if reader is not None:  # else the peer was given up meanwhile
                self._readers = [*self._readers, reader]

    # The end

    def stop(self) -> None:
        """Let those who hear end, when there is nothing left."""
        self.is_closing = True
        self.bell.wake()

    def drop(self, peer_id: int) -> None:
        """Close the link to a peer that is gone; nothing is reported."""
        link = self._links.get(peer_id)
        if link is not None:
            link.close(0)
        self._accepted.pop(peer_id, None)
        with self._readers_lock:
            self._readers = [reader for reader in self._readers if reader.peer_id != peer_id]

    def _lose(self, link: Link, why: str) -> None:
        link.why = why
        is_news = not link.is_closed and self._links.get(link.peer_id) is link
        link.close(0)
        if is_news and not self.is_closing:
            self._on_lost(link.peer_id, why, link.is_up)

    def close(self) -> None:
        """Close everything. Nobody may take messages any more."""
        with self._lock:
            self.is_closing = True
        for link in list(self._links.values()):
            link.flush()
            link.wait_read(_GOODBYE_MS / 1000)
            link.close(_GOODBYE_MS if link.is_up else 0)
        self._watch.stop()
        self._context.term()
        # RRefs that outlive the worker hold it: it must not hold memory.
        self._links.clear()
        self._accepted.clear()
        self._readers = []
        self._mail.clear()
        self.bell.close()
