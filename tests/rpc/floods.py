"""What strangers send in masses before they have proved anything: connections, and frames of any size."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.rpc.strangers import Door

CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
MECHANISMS = (b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"")
PAGE_BYTES = resource.getpagesize()
MB = 1 << 20
# Around all limits that there may be, and what overflows a count.
_NEAR_POWERS = [(1 << power) + step for power in range(10, 65) for step in (-1, 0, 1)]
SIZES = [0, 1, 8, 199, 200, 201, 255, 256, *[size for size in _NEAR_POWERS if size < 1 << 64]]


def limit_files(number: int) -> None:
    """Let this process have so many descriptors and no more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def abstract_doors(prefix: str) -> list[Door]:
    """Abstract sockets that anybody on this host can see, by the beginning of their name."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [Door(name) for name in dict.fromkeys(names) if name.startswith(prefix)]


@contextmanager
def held_open(doors: list[Door], number: int) -> Generator[list[socket.socket]]:
    """Open so many connections to each door, and keep them."""
    open_ones: list[socket.socket] = []
    for door in doors:
        for _ in range(number):
            with suppress(OSError):
                open_ones.append(door.connect())
    try:
        yield open_ones
    finally:
        for sock in open_ones:
            sock.close()


def fill(doors: list[Door], number: int) -> int:
    """The same, and close them; how many there were."""
    with held_open(doors, number) as open_ones:
        return len(open_ones)


def try_doors(doors: list[Door]) -> list[str]:
    """What happens to this process at each door: the error's name, 'kept out' when it is shut at once, or
    what was said to it.
    """
    seen: list[str] = []
    for door in doors:
        try:
            with door.connect() as sock:
                sock.settimeout(10)
                seen.append(sock.recv(64).hex() or "kept out")
        except ConnectionResetError:
            seen.append("kept out")
        except OSError as error:
            seen.append(type(error).__name__)
    return seen


def frame_header(size: int, flags: int = 0x06) -> bytes:
    """Of a long command, which the first frame of a handshake is."""
    return bytes([flags]) + struct.pack(">Q", size)


def send_first_frame(door: Door, size: int, sent_bytes: int, greeting: bytes = CURVE_GREETING) -> int:
    """Begin a first frame of a size, and send so much of it; how many bytes were taken."""
    taken = 0
    chunk = os.urandom(min(MB, sent_bytes) or 1)
    with suppress(OSError), door.connect() as sock:
        sock.sendall(greeting + frame_header(size))
        sock.settimeout(2)
        while taken < sent_bytes:
            taken += sock.send(chunk[: sent_bytes - taken])
        # The end of what came shows that all was read, or that the connection was shut.
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    return taken


def send_any_frame(door: Door, rng: random.Random) -> None:
    """A greeting, often a right one, then frames of sizes that are not always theirs."""
    greeting = bytearray(CURVE_GREETING)
    if rng.random() < 0.3:
        greeting[12:32] = rng.choice(MECHANISMS).ljust(20, b"\0")
    if rng.random() < 0.2:
        greeting[rng.randrange(len(greeting))] ^= 1 << rng.randrange(8)
    data = bytearray(greeting[: rng.choice((64, 64, 64, rng.randrange(65)))])
    for _ in range(rng.randrange(4)):
        size = rng.choice(SIZES)
        flags = rng.choice((0x00, 0x01, 0x02, 0x03, 0x04, 0x06, rng.randrange(256)))
        is_long = bool(flags & 0x02)
        data += bytes([flags]) + (struct.pack(">Q", size) if is_long else bytes([size & 255]))
        name = rng.choice((b"\x05HELLO\x01\x00", b"\x08INITIATE", b"\x07MESSAGE", b"\x05READY", b""))
        data += name + rng.randbytes(min(size, rng.choice((0, 20, 192, 200, 5000))))
    with suppress(OSError), door.connect() as sock:
        sock.sendall(data)
        if rng.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.05)
            while sock.recv(4096):
                pass


def run_door_batch(doors: list[Door], seed: int, batch: int, num_frames: int) -> None:
    """Send so many beginnings of a connection to doors, that follow from the seed and the batch's number."""
    rng = random.Random(f"{seed}/doors/{batch}")
    for _ in range(num_frames):
        send_any_frame(rng.choice(doors), rng)
