"""Feed frames that no worker made to the decoder of messages.

    scripts/rpc_fuzz --frames 10000000 --seed 7

Half of the frames are messages that were changed a little, the others are random bytes, with a right header
or without. Whatever `decode_message` accepts must encode to the very same frame; what it refuses must be
refused with WireError. Nothing may be unpickled on the way, and the process must not grow.

With `--doors N` it sends N beginnings of a connection to the open inbox of a worker instead: greetings, first
frames of any size, whole or not, before anything is proved. Nothing of them may come through, the inbox must
still let a peer in, and the process must not grow.

Frames come in batches; the seed of a batch follows from the run's seed and the batch's number, so that a
failure can be had again with `--batch`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import random
import resource
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from unittest import mock

from tests.rpc.floods import resident_bytes, run_door_batch
from tests.rpc.strangers import Door
from weft.rpc.links import Links
from weft.rpc.secret import derive_keys
from weft.rpc.wire import INLINE_BYTES, Kind, Message, WireError, decode_message, encode_message
from weft.trust import JobSecret, make_secret

BATCH_FRAMES = 5_000
DOOR_BATCH_FRAMES = 500
PEER_SECS = 20.0
GROWTH_BYTES = 64 << 20
HEADER = bytes(encode_message(Message(Kind.CALL, 1, 2, 3, b""))[0])
EDGES = (0, 1, 2, 5, 6, 255, INLINE_BYTES, INLINE_BYTES + 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
         1 << 63, (1 << 64) - 1)  # fmt: skip

Parts = list[bytearray]


@dataclass
class Tally:
    """What became of the frames."""

    frames: int = 0
    accepted: int = 0
    refused: int = 0


def check_frame(parts: list[bytes | bytearray | memoryview], tally: Tally) -> None:
    """Decode one frame and hold the decoder to its promise."""
    tally.frames += 1
    try:
        message = decode_message(parts)  # pyright: ignore[reportArgumentType]
    except WireError:
        tally.refused += 1
        return
    again = encode_message(message)
    assert len(again) == len(parts), f"{len(parts)} parts became {len(again)}"
    for before, after in zip(parts, again, strict=True):
        assert bytes(before) == bytes(after), "the encoding of a decoded message differs"
    tally.accepted += 1


def make_message(rng: random.Random) -> Message:
    sizes = [rng.choice((0, 1, 7, 64, 300)) for _ in range(rng.choice((0, 0, 0, 1, 2, 5)))]
    if rng.random() < 0.02:
        sizes.append(rng.choice((INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1)))
    return Message(
        rng.choice(list(Kind)),
        rng.getrandbits(32),
        rng.getrandbits(64),
        rng.getrandbits(64),
        rng.randbytes(rng.choice((0, 1, 20, 100, 400))),
        [rng.randbytes(size) for size in sizes],
    )


def flip_bit(parts: Parts, rng: random.Random) -> None:
    part = rng.choice(parts)
    if part:
        # The header and the lengths are where a change matters most.
        at = rng.randrange(min(len(part), rng.choice((64, len(part)))))
        part[at] ^= 1 << rng.randrange(8)


def set_number(parts: Parts, rng: random.Random) -> None:
    width = rng.choice((2, 4, 8))
    at = rng.randrange(0, 80, 2)
    parts[0][at : at + width] = (rng.choice(EDGES) % (1 << 8 * width)).to_bytes(width, "little")


def cut(parts: Parts, rng: random.Random) -> None:
    part = rng.choice(parts)
    del part[rng.randrange(len(part) + 1) :]


def grow(parts: Parts, rng: random.Random) -> None:
    rng.choice(parts).extend(rng.randbytes(rng.choice((1, 8, 40))))


def drop_middle(parts: Parts, rng: random.Random) -> None:
    part = rng.choice(parts)
    start = rng.randrange(len(part) + 1)
    del part[start : start + rng.choice((1, 8))]


def add_part(parts: Parts, rng: random.Random) -> None:
    parts.insert(rng.randrange(len(parts) + 1), bytearray(rng.randbytes(rng.choice((0, 1, 48)))))


def drop_part(parts: Parts, rng: random.Random) -> None:
    del parts[rng.randrange(len(parts))]


def swap_parts(parts: Parts, rng: random.Random) -> None:
    rng.shuffle(parts)


CHANGES: list[Callable[[Parts, random.Random], None]] = [
    *[flip_bit] * 3, *[set_number] * 2, cut, grow, drop_middle, add_part, drop_part, swap_parts,
]  # fmt: skip


def make_frame(messages: list[list[bytes]], rng: random.Random) -> list[bytes | bytearray | memoryview]:
    """One frame: a message, one that was changed, or random bytes."""
    draw = rng.random()
    if draw < 0.25:
        return [rng.randbytes(rng.randrange(120))]
    if draw < 0.5:
        header = HEADER[: rng.choice((4, 8, 12, 16, 32, 40))]
        return [header + rng.randbytes(rng.randrange(120)) for _ in range(rng.choice((1, 1, 1, 2)))]
    parts = [bytearray(part) for part in rng.choice(messages)]
    if draw < 0.95:
        for _ in range(rng.choice((1, 1, 2, 4))):
            if parts:
                rng.choice(CHANGES)(parts, rng)
    if draw > 0.9:
        return [memoryview(part) for part in parts]
    return list[bytes | bytearray | memoryview](parts)


def run_batch(seed: int, batch: int, num_frames: int, tally: Tally) -> None:
    rng = random.Random(f"{seed}/{batch}")
    messages = [[bytes(part) for part in encode_message(make_message(rng))] for _ in range(100)]
    for index in range(num_frames):
        frame = make_frame(messages, rng)
        try:
            check_frame(frame, tally)
        except BaseException as error:
            shown = [bytes(part[:120]).hex() for part in frame]
            error.add_note(f"--seed {seed} --batch {batch}, frame {index} of it: {shown}")
            raise


@contextlib.contextmanager
def no_unpickling() -> Generator[None]:
    """Make every way to unpickle fail."""
    names = ("loads", "load", "Unpickler", "_Unpickler", "_loads", "_load")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(pickle, name, side_effect=AssertionError("unpickled")))
        yield


def run_frames(num_frames: int, seed: int, progress: Callable[[Tally], None] | None = None) -> Tally:
    """Check so many frames. Raises what a frame led to that it must not, with the seed in its notes."""
    tally = Tally()
    start_bytes = 0
    with no_unpickling():
        for batch in range(-(-num_frames // BATCH_FRAMES)):
            run_batch(seed, batch, min(BATCH_FRAMES, num_frames - tally.frames), tally)
            if batch == 0:
                start_bytes = _peak_bytes()
            elif (grown := _peak_bytes() - start_bytes) > GROWTH_BYTES:
                raise AssertionError(f"the process grew by {grown:,} bytes in {tally.frames:,} frames")
            if progress is not None:
                progress(tally)
    return tally


def run_doors(num_frames: int, seed: int, progress: Callable[[int], None] | None = None) -> None:
    """Send so many to an inbox of this process, and hold it to its promise after each batch."""
    secret = make_secret()
    inbox = Links(0, derive_keys(secret), "127.0.0.1", lambda *_: None)
    try:
        doors = [Door(inbox.local_address.removeprefix("ipc://"))]
        assert inbox.remote_address is not None
        host, port = inbox.remote_address.removeprefix("tcp://").split(":")
        doors.append(Door(host, int(port)))
        start_bytes = 0
        for batch in range(-(-num_frames // DOOR_BATCH_FRAMES)):
            run_door_batch(doors, seed, batch, min(DOOR_BATCH_FRAMES, num_frames - batch * DOOR_BATCH_FRAMES))
            assert not inbox.has_mail(), f"--seed {seed}: something came through in batch {batch}"
            check_peer_gets_in(inbox, secret)
            if batch == 0:
                start_bytes = resident_bytes(os.getpid())
            elif (grown := resident_bytes(os.getpid()) - start_bytes) > GROWTH_BYTES:
                raise AssertionError(f"--seed {seed}: the process grew by {grown:,} bytes in batch {batch}")
            if progress is not None:
                progress(min(num_frames, (batch + 1) * DOOR_BATCH_FRAMES))
    finally:
        inbox.stop()
        inbox.close()


def check_peer_gets_in(inbox: Links, secret: JobSecret) -> None:
    """A peer that knows the secret comes, says something, and goes."""
    peer = Links(9, derive_keys(secret), None, lambda *_: None)
    try:
        for number, address in enumerate((inbox.local_address, str(inbox.remote_address))):
            peer.open(number, address)
            assert peer.wait_up(number) is None, "a peer was kept out"
            peer.send(number, [b"let me in"])
            assert hear_one(inbox) == [b"let me in"]
    finally:
        peer.stop()
        peer.close()


def hear_one(inbox: Links) -> list[bytes]:
    """The next message, waited for."""
    gives_up_at = time.monotonic() + PEER_SECS
    while time.monotonic() < gives_up_at:
        signal = inbox.bell.signal()
        parts = inbox.take()
        if parts is not None:
            return [bytes(part) for part in parts]
        inbox.bell.sleep(signal, PEER_SECS)
    raise AssertionError("a peer was not heard")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/rpc_fuzz", description="Fuzz the messages of weft.rpc.")
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many frames to check")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; a new one by default")
    parser.add_argument("--doors", type=int, default=0, help="send so many to an open inbox instead")
    parser.add_argument("--batch", type=int, default=None, help="only this batch of the run")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.doors:
        run_doors(options.doors, seed, lambda sent: print(f"{sent:>12,} beginnings sent", flush=True))
        print(f"ok: {options.doors:,} beginnings, seed {seed}")
        return
    if options.batch is not None:
        tally = Tally()
        with no_unpickling():
            run_batch(seed, options.batch, BATCH_FRAMES, tally)
        print(f"batch {options.batch}: {tally}")
        return
    started_at = said_at = time.monotonic()

    def say(tally: Tally) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= 5 or tally.frames >= options.frames:
            said_at = now
            print(
                f"{tally.frames:>12,} frames, {tally.accepted:,} accepted, {tally.refused:,} refused, "
                f"{tally.frames / (now - started_at):,.0f} a second, {_peak_bytes() >> 20} MiB, seed {seed}",
                flush=True,
            )

    run_frames(options.frames, seed, say)
    print(f"ok: {options.frames:,} frames, seed {seed}")


if __name__ == "__main__":
    main()
