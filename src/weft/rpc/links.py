"""Links: how messages get from one worker to another. zmq moves them, CURVE keeps strangers out.

A worker hears on one socket and speaks on one socket a peer, opened when it is first needed. What one worker
sends to another arrives in order, once, or the link is lost for good: a link that broke is never opened
again, since nobody could tell which messages had arrived.

`send` may be called from any thread and never waits. `receive` is called by one thread at a time. A thread of
its own watches the links: it lets peers in that hold the key and reports links that are lost.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from weft.errors import ConfigError, PeerError
from weft.rpc.secret import Keys

Part = bytes | memoryview

# A peer has published its address by the time it is called, so a link that is not up by then won't come up.
CONNECT_SECS = 1.5
# Between hosts only silence tells of a death that no packet tells of.
_HEARTBEAT_MS = 400
_SILENCE_MS = 1200
_GOODBYE_MS = 500  # for what is still on its way out when a worker leaves
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Link:
    """The way to one peer."""

    def __init__(self, peer_id: int, socket: zmq.Socket[bytes]) -> None:
        self.peer_id = peer_id
        self.socket = socket
        self.lock = threading.Lock()  # a zmq socket is for one thread at a time
        self.opened_at = time.monotonic()
        self.is_up = False
        self.is_closed = False

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
        self._keys = keys
        self._on_lost = on_lost
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self.local_address = f"ipc://@weft-rpc-{uuid.uuid4().hex}"  # abstract: no file is left behind
        self.remote_address: str | None = None
        self._unwatched: queue.SimpleQueue[tuple[Link, zmq.Socket[bytes]] | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="weft-rpc-watch", daemon=True)
        try:
            self._doorman = self._context.socket(zmq.REP)
            self._doorman.bind("inproc://zeromq.zap.01")
            self._bell_heard = self._context.socket(zmq.PULL)
            self._bell_heard.bind("inproc://bell")
            self._inbox = self._make_inbox(listen)
            self._own = Link(own_id, self._context.socket(zmq.PUSH))
            self._own.socket.set_hwm(0)
            self._own.socket.connect("inproc://inbox")
            self._own.is_up = True
            self._links[own_id] = self._own
            self._bell = self._context.socket(zmq.PUSH)
            self._bell.connect("inproc://bell")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._watcher.start()

    def _make_inbox(self, listen: str | None) -> zmq.Socket[bytes]:
        inbox = self._context.socket(zmq.PULL)
        inbox.set_hwm(0)
        inbox.curve_server = 1
        inbox.curve_publickey, inbox.curve_secretkey = self._keys.public, self._keys.secret
        inbox.setsockopt(zmq.ZAP_DOMAIN, b"weft.rpc")
        inbox.bind("inproc://inbox")
        inbox.bind(self.local_address)
        if listen is not None:
            host = f"[{listen}]" if ":" in listen else listen
            inbox.setsockopt(zmq.IPV6, int(":" in listen))
            try:
                port = inbox.bind_to_random_port(f"tcp://{host}")
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"init_rpc: can't listen on {listen!r} ({error}). Give an address of this host."
                ) from error
            self.remote_address = f"tcp://{host}:{port}"
        return inbox

    def open(self, peer_id: int, address: str) -> None:
        """Begin to connect to a peer. What is sent meanwhile goes when the link is up."""
        with self._lock:
            if peer_id in self._links or self._is_closing:
                return
            socket = self._make_socket(address)
            monitor = socket.get_monitor_socket(_WATCHED)
            socket.connect(address)
            link = self._links[peer_id] = Link(peer_id, socket)
            self._unwatched.put((link, monitor))
            self._bell.send(b"")

    def _make_socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)  # agents limit the calls that are under way; a link must not block
        socket.curve_serverkey = self._keys.public
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if address.startswith("tcp"):
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECS * 1000))
        return socket

    def send_last(self, address: str, parts: Sequence[Part]) -> None:
        """Send one message to a worker whose link is lost, on a link of its own. It may not arrive."""
        with self._lock:
            if not self._is_closing:
                socket = self._make_socket(address)
                socket.connect(address)
                socket.send_multipart(parts)
                socket.close(linger=_GOODBYE_MS)

    def is_open(self, peer_id: int) -> bool:
        """Whether a link to the peer was ever opened."""
        return peer_id in self._links

    def send(self, peer_id: int, parts: Sequence[Part]) -> None:
        """Send one message. Raises PeerError when the link is closed; never waits."""
        link = self._links[peer_id]
        with link.lock:
            if link.is_closed:
                raise PeerError(f"the link to worker {peer_id} is closed.", [peer_id])
            if len(parts) == 1:
                link.socket.send(parts[0])
            else:
                link.socket.send_multipart(parts)

    def receive(self) -> list[Part] | None:
        """Wait for the next message from any peer; None when the links are closing."""
        frame = self._inbox.recv(copy=False)
        if not frame.more:
            # Only `stop` sends an empty one past the door: peers' messages begin with a header.
            return [frame.bytes] if len(frame) or not self._is_closing else None
        parts: list[Part] = [frame.buffer]
        while frame.more:
            frame = self._inbox.recv(copy=False)
            parts.append(frame.buffer)
        return parts

    def stop(self) -> None:
        """Make `receive` return None, now or the next time."""
        self._is_closing = True
        with self._own.lock:
            self._own.socket.send(b"")

    def close(self) -> None:
        """Close everything. Nobody may be in `receive`, nor call it again."""
        with self._lock:
            self._is_closing = True
        for link in list(self._links.values()):
            link.close(_GOODBYE_MS if link.is_up else 0)
        self._unwatched.put(None)
        with self._lock:
            self._bell.send(b"")
        self._watcher.join()
        for socket in (self._inbox, self._bell):
            socket.close(linger=0)
        self._context.term()

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._doorman, zmq.POLLIN)
        poller.register(self._bell_heard, zmq.POLLIN)
        watched: dict[Any, Link] = {}
        is_ending = False
        while not (is_ending and not watched):
            late = [link for link in watched.values() if not link.is_up and not link.is_closed]
            wait_secs = min((link.opened_at + CONNECT_SECS for link in late), default=None)
            wait_ms = None if wait_secs is None else max(0, int((wait_secs - time.monotonic()) * 1000) + 1)
            ready = dict(poller.poll(wait_ms))
            if self._doorman in ready:
                self._admit(self._doorman.recv_multipart())
            if self._bell_heard in ready:
                self._bell_heard.recv()
                new = self._unwatched.get()
                if new is None:
                    is_ending = True
                else:
                    poller.register(new[1], zmq.POLLIN)
                    watched[new[1]] = new[0]
            for monitor in [socket for socket in watched if socket in ready]:
                if self._note(watched[monitor], zmq.utils.monitor.recv_monitor_message(monitor)["event"]):
                    poller.unregister(monitor)
                    monitor.close(linger=0)
                    del watched[monitor]
            for link in watched.values():
                if not link.is_up and time.monotonic() > link.opened_at + CONNECT_SECS:
                    self._lose(link, "it does not answer, or it does not know this worker's secret")
        self._doorman.close(linger=0)
        self._bell_heard.close(linger=0)

    def _note(self, link: Link, event: int) -> bool:
        """Act on what happened to a link; say whether nothing more will."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.is_up = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._lose(link, "it does not know the same secret")
        elif event == zmq.EVENT_DISCONNECTED and link.is_up:
            self._lose(link, "its process ended, or the network to it broke")
        return event == zmq.EVENT_MONITOR_STOPPED

    def _lose(self, link: Link, why: str) -> None:
        is_news = not link.is_closed
        link.close(0)
        if is_news and not self._is_closing:
            self._on_lost(link.peer_id, why, link.is_up)

    def drop(self, peer_id: int) -> None:
        """Close the link to a peer that left; nothing is reported."""
        link = self._links.get(peer_id)
        if link is not None:
            link.close(0)

    def _admit(self, request: list[bytes]) -> None:
        """Answer zmq's question about a peer that has ended the handshake: does it hold our key?"""
        version, request_id, _, _, _, mechanism, *credentials = request
        is_known = (
            mechanism == b"CURVE" and len(credentials) == 1
            and zmq.utils.z85.encode(credentials[0]) == self._keys.public
        )  # fmt: skip
        answer = [b"200", b"OK", b"weft", b""] if is_known else [b"400", b"no", b"", b""]
        self._doorman.send_multipart([version, request_id, *answer])
