"""The socket that peers connect to: its addresses, and limits on connections that are not authenticated yet.

Among workers of one host it is a Unix socket whose file is removed as soon as it is bound; peers reach it by
this process's descriptor of the file, which the kernel opens only for processes of this user. Nothing is left
behind, however this process ends. Where peers can't open its descriptors (an undumpable process), it is an
abstract socket that accepts connections of this user only.

A connection is proven once a message came over it: zmq delivers none before the CURVE handshake. Until then
it may send FRAME_BYTES at most and has HANDSHAKE_SECS, and the number of unproven connections is limited: the
oldest is shut down for a new one, so that clients without the secret can't keep peers out.

`receive` and `note_connections` must be called on one thread.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import zmq
import zmq.utils.monitor

from weft.errors import ConfigError
from weft.rpc.frames import FRAME_BYTES, join_frames
from weft.rpc.secret import Keys

HANDSHAKE_SECS = 10.0
MAX_FRAME_BYTES = FRAME_BYTES + 1024  # enciphered, a frame is a little longer
ABSTRACT_PREFIX = "ipc://@weft-rpc-"

_MAX_UNPROVEN = 1024
_MIN_UNPROVEN = 16
_BACKLOG = 100
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
# libzmq aborts the process when accept() fails for want of a descriptor. It accepts while its monitor has
# room for events, 1,001 of them: so many connections may be open before they are counted, and as many be
# closing, besides the unproven ones and the process's own descriptors.
_WANTED_FILES = 8192
_FD_PROPERTY = "__fd"  # zmq's name for the descriptor of the connection that a message came over


class Inbox:
    """Where the messages of all peers arrive."""

    def __init__(self, context: zmq.Context[Any], keys: Keys, listen: str | None) -> None:
        self.remote_address: str | None = None
        self._unproven: dict[int, None] = {}  # descriptors of connections, in the order in which they came
        self._max_unproven = _limit_unproven()
        self._own_names: set[Any] = set()  # as getsockname has them
        self._path_fd: int | None = None
        self.socket = context.socket(zmq.PULL)
        self.monitor = _monitor(context, self.socket)
        try:
            self._set_options(keys)
            self.local_address = self._bind_local()
            if listen is not None:
                self._bind_remote(listen)
        except BaseException:
            self.close()
            raise

    def _set_options(self, keys: Keys) -> None:
        self.socket.set_hwm(0)
        self.socket.curve_server = 1
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"weft.rpc")
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECS * 1000))
        self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)

    def _bind_local(self) -> str:
        unlinked = _listen_unlinked()
        if unlinked is None:
            return self._bind_abstract()
        listening, self._path_fd = unlinked
        self._own_names.add(listening.getsockname())
        address = f"ipc:///proc/{os.getpid()}/fd/{self._path_fd}"
        self.socket.setsockopt(zmq.USE_FD, listening.detach())  # zmq closes it
        self.socket.bind(address)
        self.socket.setsockopt(zmq.USE_FD, -1)
        return address

    def _bind_abstract(self) -> str:
        address = ABSTRACT_PREFIX + uuid.uuid4().hex
        self._own_names.add(b"\0" + address.removeprefix("ipc://@").encode())
        try:
            self.socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        except zmq.ZMQError as error:
            raise ConfigError(
                f"init_rpc: this libzmq can't keep other users' connections out (IPC_FILTER_UID: {error}). "
                "Install pyzmq from its wheel, which can."
            ) from error
        self.socket.bind(address)
        return address

    def _bind_remote(self, listen: str) -> None:
        host = f"[{listen}]" if ":" in listen else listen
        self.socket.setsockopt(zmq.IPV6, int(":" in listen))
        try:
            port = self.socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"init_rpc: can't listen on {listen!r} ({error}). Give an address of this host."
            ) from error
        self.remote_address = f"tcp://{host}:{port}"
        self._own_names.add(port)

    def receive(self) -> Sequence[bytes]:
        """Return the parts of the next message; raises zmq.Again when none has arrived."""
        first = cast("zmq.Frame", self.socket.recv(zmq.NOBLOCK, copy=False))
        # The monitor reports a connection before its first message, so none is counted too late.
        if self.monitor.getsockopt(zmq.EVENTS):
            self.note_connections()
        if self._unproven:
            self._unproven.pop(_fd_of(first), None)
        if not first.more:
            return [first.bytes]
        frames = [first.buffer]
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(cast("zmq.Frame", self.socket.recv(copy=False)).buffer)
        return join_frames(frames)

    def note_connections(self) -> None:
        """Count connections as they open and close; shut the oldest when too many are unproven."""
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            fd = int(event["value"])
            self._unproven.pop(fd, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unproven[fd] = None
                if len(self._unproven) > self._max_unproven:
                    self._shut_oldest()

    def _shut_oldest(self) -> None:
        fd = next(iter(self._unproven))
        del self._unproven[fd]
        # zmq can't close one connection on request, but closes its descriptor when it reads end of file. It
        # may have closed it already, and the number may be another file's by now: hence the check of its
        # name.
        try:
            connection = socket.socket(fileno=fd)
        except OSError:
            return
        try:
            name = connection.getsockname()
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if (name[1] if is_tcp else name) in self._own_names:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has closed it meanwhile
        finally:
            connection.detach()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.socket.close(linger=0)
        # zmq's thread may block on a full monitor, and closes nothing until its events have been read.
        while zmq.utils.monitor.recv_monitor_message(self.monitor)["event"] != zmq.EVENT_MONITOR_STOPPED:
            pass
        self.monitor.close(linger=0)
        if self._path_fd is not None:
            os.close(self._path_fd)
            self._path_fd = None


def _monitor(context: zmq.Context[Any], watched: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Make the monitor of a socket, with the shortest queue of events that zmq has."""
    address = f"inproc://inbox-{uuid.uuid4().hex}"
    watched.monitor(address, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.set_hwm(1)
    monitor.connect(address)
    return monitor


def _fd_of(frame: zmq.Frame) -> int:
    try:
        return int(cast(Any, frame.get(_FD_PROPERTY)))
    except (zmq.ZMQError, TypeError, ValueError):
        return -1


def _limit_unproven() -> int:
    """Return how many connections may be unproven: a quarter of the process's descriptors at most.

    Raises the soft limit of descriptors to _WANTED_FILES where the hard limit allows it.
    """
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit
                  for limit in resource.getrlimit(resource.RLIMIT_NOFILE))  # fmt: skip
    if soft < min(hard, _WANTED_FILES):
        soft = min(hard, _WANTED_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(_MIN_UNPROVEN, min(_MAX_UNPROVEN, soft // 4))


def _listen_unlinked() -> tuple[socket.socket, int] | None:
    """Make a listening Unix socket whose file is removed, and a descriptor of the file to connect by.

    None where peers can't connect that way: this process is undumpable, or /proc lacks what is needed.
    """
    if os.stat(f"/proc/{os.getpid()}/fd").st_uid != os.geteuid():
        return None
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path_fd: int | None = None
    try:
        path_fd = _bind_unlinked(listening)
        listening.listen(_BACKLOG)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(f"/proc/{os.getpid()}/fd/{path_fd}")
    except OSError:
        listening.close()
        if path_fd is not None:
            os.close(path_fd)
        return None
    return listening, path_fd


def _bind_unlinked(listening: socket.socket) -> int:
    """Bind a socket to a file in a private folder and remove both; returns a descriptor of the file."""
    folder = tempfile.mkdtemp(prefix="weft-rpc-")  # mode 0700
    name = uuid.uuid4().hex
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{folder_fd}/{name}"  # short, however long the folder's path is
        listening.bind(path)
        try:
            return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(path)
    finally:
        os.close(folder_fd)
        with suppress(OSError):
            os.rmdir(folder)
