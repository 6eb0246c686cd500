"""The thread behind the links: it takes in what zmq brings, lets peers in that hold the key, and sees links
break.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from weft.rpc.inbox import Inbox

if TYPE_CHECKING:
    from weft.rpc.links import Link

# A peer listens before it is called: one that has not taken the connection by then won't.
CONNECT_SECS = 1.5
_HANDSHAKE_SECS = 30.0
_FLUSH_MS = 1
_BELL = "inproc://bell"
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Watch:
    """Watches over an inbox and the links of one worker.

    `take(parts)` gets each message; `lose(link, why)` hears of each link that breaks, or never comes up.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        public_key: bytes,
        inbox: Inbox,
        take: Callable[[Sequence[bytes]], None],
        lose: Callable[[Link, str], None],
    ) -> None:
        self._context = context
        self._public_key = public_key
        self._inbox = inbox
        self._take = take
        self._lose = lose
        self._doorman = context.socket(zmq.REP)
        self._doorman.bind("inproc://zeromq.zap.01")
        self._heard = context.socket(zmq.PULL)
        self._heard.bind(_BELL)
        self._bell = context.socket(zmq.PUSH)
        self._bell.connect(_BELL)
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Link, zmq.Socket[bytes] | None] | None] = queue.SimpleQueue()
        self._poller = zmq.Poller()
        self._links: dict[Any, Link] = {}  # by the socket that tells what happens to them
        self._overflowing: set[Link] = set()
        self._thread = threading.Thread(target=self._run, name="weft-rpc-watch", daemon=True)
        self._thread.start()

    def add(self, link: Link) -> None:
        """Watch a link that is about to connect."""
        self._order((link, link.socket.get_monitor_socket(_EVENTS)))

    def flush_soon(self, link: Link) -> None:
        """Send what waits on a link when there is room."""
        self._order((link, None))

    def stop(self) -> None:
        """End, once every link is closed."""
        self._order(None)
        self._thread.join()
        self._bell.close(linger=0)

    def _order(self, order: tuple[Link, zmq.Socket[bytes] | None] | None) -> None:
        with self._lock:
            self._orders.put(order)
            self._bell.send(b"")

    def _run(self) -> None:
        for socket in (self._doorman, self._heard, self._inbox.socket, self._inbox.monitor):
            self._poller.register(socket, zmq.POLLIN)
        is_ending = False
        while not (is_ending and not self._links):
            ready = dict(self._poller.poll(self._patience_ms()))
            if self._inbox.monitor in ready:
                self._inbox.note_connections()
            if self._inbox.socket in ready:
                self._empty_inbox()
            if self._doorman in ready:
                self._admit(self._doorman.recv_multipart())
            if self._heard in ready:
                self._heard.recv()
                is_ending = self._obey(self._orders.get()) or is_ending
            for monitor in [socket for socket in self._links if socket in ready]:
                self._note(monitor)
            self._look_at_links()
        for socket in (self._doorman, self._heard):
            socket.close(linger=0)  # before the inbox, whose handshakes may wait for the doorman's answer
        self._inbox.close()

    def _patience_ms(self) -> int | None:
        """How long nothing need be done unless something happens."""
        if self._overflowing:
            return _FLUSH_MS
        ends = [link.gives_up_at for link in self._links.values() if not link.is_up and not link.is_closed]
        if not ends:
            return None
        return max(0, int((min(ends) - time.monotonic()) * 1000) + 1)

    def _obey(self, order: tuple[Link, zmq.Socket[bytes] | None] | None) -> bool:
        """Do what another thread asked for; whether that is to end."""
        if order is None:
            return True
        link, monitor = order
        if monitor is None:
            self._overflowing.add(link)
        else:
            self._poller.register(monitor, zmq.POLLIN)
            self._links[monitor] = link
        return False

    def _empty_inbox(self) -> None:
        # All that is there at once: the poll before it costs more than a message does.
        try:
            while True:
                self._take(self._inbox.receive())
        except zmq.Again:
            return

    def _note(self, monitor: zmq.Socket[bytes]) -> None:
        """Act on what happened to a link."""
        link = self._links[monitor]
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            # It is there. It may be busy for long (Python's lock, a debugger) before it answers.
            link.gives_up_at = time.monotonic() + _HANDSHAKE_SECS
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.is_up = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._lose(link, "it does not know the same secret")
        elif event == zmq.EVENT_DISCONNECTED:
            ended = "its process ended, or the network to it broke"
            self._lose(link, ended if link.is_up else f"{ended}, or it does not know this worker's secret")
        elif event == zmq.EVENT_MONITOR_STOPPED:
            self._poller.unregister(monitor)
            monitor.close(linger=0)
            del self._links[monitor]

    def _look_at_links(self) -> None:
        self._overflowing = {link for link in self._overflowing if not link.is_closed and not link.flush()}
        for link in self._links.values():
            is_late = not link.is_up and time.monotonic() > link.gives_up_at
            if is_late and not link.is_closed:
                self._lose(link, "it does not answer, or it does not know this worker's secret")

    def _admit(self, request: list[bytes]) -> None:
        """Answer zmq's question about a peer that has ended the handshake: does it hold our key?"""
        version, request_id, _, _, _, mechanism, *credentials = request
        is_known = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and zmq.utils.z85.encode(credentials[0]) == self._public_key
        )
        answer = [b"200", b"OK", b"weft", b""] if is_known else [b"400", b"no", b"", b""]
        self._doorman.send_multipart([version, request_id, *answer])
