"""What the launcher and a process-rank say to each other, and how it is framed.

A job goes through these messages, in this order:

    launcher                         rank
       |  --- Meet -------------------> |   once, while the rank starts
       |  <------------- Ready --------  |   once, when it has started
       |  --- Job --------------------> |
       |  <--------- Returned | Failed - |   the function ended
       |  --- Finish ----------------> |   it has ended on every rank, or one failed
       |  <------------- Idle ---------  |   the rank's groups are gone

Frames are an 8-byte length and a pickle. Both ends are one user's processes on
one host, joined by a socket pair that nobody else can open.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Meet:
    """The port of the store in which the ranks meet. Ranks start while the launcher is still making it.

    `secret` (weft.trust) is sent in this message only: it is in no environment, argument list or file.
    """

    store_port: int
    secret: bytes = field(repr=False)
    # From WEFT_SECRET_FILE: ranks of other launchers use it too, so it is the same for each job.
    is_given: bool


@dataclass(frozen=True)
class Ready:
    """The rank has imported torch and waits for jobs."""


@dataclass(frozen=True)
class Job:
    """One call for every rank of the pool; `call` is what payload.encode_call made."""

    call: bytes
    backend: str
    collective_timeout_secs: float
    # The part of the store that is this job's alone, and a port for user code that makes its own.
    store_corner: str
    master_port: int
    # The launcher's own, so that the function finds modules, files and arguments as its caller would.
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    working_dir: str


@dataclass(frozen=True)
class Returned:
    """The function returned; `result` is pickled."""

    result: bytes


@dataclass(frozen=True)
class Failed:
    """The function raised. `exception` is its pickle where it has one, `report` always is text."""

    headline: str
    report: str
    exception: bytes | None
    is_consequence: bool
    # CLOCK_MONOTONIC, which all processes of a host share: it tells which rank failed first.
    at_secs: float


@dataclass(frozen=True)
class Finish:
    """No rank needs this one's groups any more."""


@dataclass(frozen=True)
class Idle:
    """The rank's groups are gone; the next job may come."""


Message = Meet | Ready | Job | Returned | Failed | Finish | Idle


class MessageReader:
    """Cuts the bytes that came so far into messages. No I/O.

    A rank that stops in the middle of a message therefore blocks nobody.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, received: bytes) -> list[Message]:
        """Take more bytes and return the messages that they complete."""
        self._pending += received
        messages: list[Message] = []
        while len(self._pending) >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._pending)
            end = _LENGTH.size + num_bytes
            if len(self._pending) < end:
                break
            messages.append(pickle.loads(self._pending[_LENGTH.size : end]))
            del self._pending[:end]
        return messages


def encode_message(message: Message) -> bytes:
    """Frame one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def receive_message(sock: socket.socket) -> Message | None:
    """Block until one whole message is there; None when the other end has closed.

    Reads exactly one frame, so that the next one stays in the socket.
    """
    header = _receive_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    body = _receive_exactly(sock, _LENGTH.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytearray | None:
    received = bytearray(num_bytes)
    view, num_received = memoryview(received), 0
    while num_received < num_bytes:
        num_new = sock.recv_into(view[num_received:])
        if num_new == 0:
            return None
        num_received += num_new
    return received
