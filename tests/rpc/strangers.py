"""Those who have no business here: sockets of a worker, found from outside, and what one may throw at them.

A bomb is a pickle that leaves a mark where it is unpickled. It travels bare, behind lengths, in the
library's own message, in the frames of a ZeroMQ peer: whatever the worker might take for its own.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LISTENING = "0A"


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, flag: Path) -> None:
        self.flag = str(flag)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.flag,)


@dataclass(frozen=True)
class Door:
    """A socket that a process listens on: tcp host and port, or a unix path (abstract ones begin with @).

    Where the file of a Unix socket is gone, its path is that of the process's descriptor of it.
    """

    host: str
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return self.port == 0

    @property
    def zmq_address(self) -> str:
        return f"ipc://{self.host}" if self.is_unix else f"tcp://{self.host}:{self.port}"

    def connect(self) -> socket.socket:
        if self.is_unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # With a timeout of Python's it would fail at once when too many wait to be accepted.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 5, 0))
            try:
                sock.connect("\0" + self.host[1:] if self.host.startswith("@") else self.host)
                sock.settimeout(5)
            except BaseException:
                sock.close()
                raise
            return sock
        return socket.create_connection((self.host, self.port), timeout=5)


def find_doors(pid: int) -> list[Door]:
    """Every socket that this process listens on."""
    files = map(_link, Path(f"/proc/{pid}/fd").iterdir())
    inodes = {target[8:-1] for target in files if target.startswith("socket:[")}
    doors: list[Door] = []
    for family, table in [(socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")]:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == LISTENING and parts[9] in inodes:
                address, port = parts[1].split(":")
                doors.append(Door(_host(family, address), int(port, 16)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        is_listening = int(parts[3], 16) & 0x10000
        if is_listening and parts[6] in inodes and len(parts) > 7 and parts[7].startswith("@"):
            doors.append(Door(parts[7]))
    return doors + [Door(str(path)) for path in Path(f"/proc/{pid}/fd").iterdir() if _leads_to_socket(path)]


def _leads_to_socket(path: Path) -> bool:
    """Whether a descriptor is of a socket's file, and not of a socket."""
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode) and not os.readlink(path).startswith("socket:")
    except OSError:
        return False


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _host(family: int, address: str) -> str:
    words = [struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8)]
    return socket.inet_ntop(family, b"".join(words))


def payloads(flag: Path) -> list[list[bytes]]:
    """The bomb in every wrapping, as frames."""
    from weft.rpc import wire

    bomb = pickle.dumps(Bomb(flag))
    as_call = pickle.dumps((Bomb(flag), (), {}))
    wrapped = [[bomb], [as_call], [b"", bomb]]
    wrapped += [[struct.pack(length, len(bomb)) + bomb] for length in ("<I", ">I", "<Q", ">Q")]
    for kind in wire.Kind:
        for body in (bomb, as_call):
            message = wire.Message(kind=kind, sender=0, call_id=1, epoch=0, body=body, buffers=())
            wrapped.append([bytes(part) for part in wire.encode_message(message)])
    return wrapped


def throw_raw(door: Door, frames: list[bytes]) -> None:
    """Write it into a bare socket, and read what comes: a hang or a crash there would show too."""
    with suppress(OSError), door.connect() as sock:
        sock.sendall(b"".join(frames))
        sock.settimeout(0.05)
        with suppress(OSError):
            sock.recv(1 << 16)


def throw_as_zmq_greeting(door: Door, frames: list[bytes]) -> None:
    """The ZMTP greeting and a NULL handshake by hand, then the frames."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    with suppress(OSError), door.connect() as sock:
        sock.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        for i, frame in enumerate(frames):
            more = int(i < len(frames) - 1)
            sock.sendall(bytes([2 | more]) + struct.pack(">Q", len(frame)) + frame)
        sock.settimeout(0.05)
        with suppress(OSError):
            sock.recv(1 << 16)


def throw_with_zmq(door: Door, bombs: list[list[bytes]], dress: Callable[[Any], None], secs: float) -> None:
    """As ZeroMQ peers of each kind, in some dress (keys, passwords, none)."""
    import zmq

    context = zmq.Context()
    try:
        for kind in [zmq.DEALER, zmq.PUSH, zmq.REQ, zmq.PUB, zmq.ROUTER]:
            peer = context.socket(kind)
            peer.linger = 0
            peer.sndtimeo = peer.rcvtimeo = 50
            peer.identity = b"worker0"
            dress(peer)
            peer.connect(door.zmq_address)
            stop_at = time.monotonic() + secs
            for frames in bombs:
                with suppress(zmq.ZMQError):
                    peer.send_multipart(frames)
                if time.monotonic() > stop_at:
                    break
            with suppress(zmq.ZMQError):
                peer.recv_multipart()
            peer.close()
    finally:
        context.destroy(linger=0)


def no_dress(peer: Any) -> None:
    pass


def plain_dress(peer: Any) -> None:
    peer.plain_username, peer.plain_password = b"worker0", b"please"


def wrong_keys(peer: Any) -> None:
    import zmq

    public, secret = zmq.curve_keypair()
    peer.curve_publickey, peer.curve_secretkey = public, secret
    peer.curve_serverkey, _ = zmq.curve_keypair()


DRESSES = [no_dress, plain_dress, wrong_keys]


def knock_and_stay(door: Door, number: int) -> list[socket.socket]:
    """Connections that say nothing, half a greeting, or rubbish, and stay open."""
    open_ones: list[socket.socket] = []
    for i in range(number):
        with suppress(OSError):
            sock = door.connect()
            sock.sendall([b"", b"\xff" + bytes(5), os.urandom(100)][i % 3])
            open_ones.append(sock)
    return open_ones


def attack(pid: int, flag: Path) -> int:
    """Throw everything at every door of the process. How many doors it had."""
    doors = find_doors(pid)
    bombs = payloads(flag)
    threads: list[threading.Thread] = []
    for door in doors:
        for frames in bombs:
            throw_raw(door, frames)
            throw_as_zmq_greeting(door, frames)
        threads += [
            threading.Thread(target=throw_with_zmq, args=(door, bombs, dress, 0.2)) for dress in DRESSES
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(doors)
