"""Messages through a ring in shared memory: in order, whole, and never more than fit."""

from __future__ import annotations

import mmap
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PeerError
from weft.local.segment import own_segment
from weft.rpc.bell import open_bell, own_bell
from weft.rpc.ring import RING_BYTES, RingReader, RingWriter

SIZES = st.one_of(st.integers(0, 64), st.integers(0, 40_000), st.integers(200_000, 400_000))
STEPS = st.lists(st.one_of(st.lists(SIZES, min_size=1, max_size=12), st.none()), max_size=60)


def parts_of(sizes: list[int], number: int) -> list[bytes]:
    return [bytes([(number + place) % 251]) * size for place, size in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_ring_is_a_queue(steps: list[list[int] | None]) -> None:
    """None reads a message, a list of sizes writes one. What does not fit is refused whole."""
    writer = RingWriter(0, 1)
    reader = RingReader(writer.name, 0, 1)
    expected: deque[list[bytes]] = deque()
    for number, step in enumerate([*steps, *[None] * (len(steps) + 1)]):
        if step is not None:
            parts = parts_of(step, number)
            if writer.write(parts):
                expected.append(parts)
            else:
                assert expected, "an empty ring has room for every message"
        else:
            assert reader.has_mail() == bool(expected)
            read = reader.read()
            assert (read is None) == (not expected)
            if read is not None:
                assert [bytes(part) for part in read] == expected.popleft()
    assert not reader.has_mail()


def test_a_full_ring_has_room_again_when_it_is_read() -> None:
    writer = RingWriter(0, 1)
    reader = RingReader(writer.name, 0, 1)
    num_written = 0
    while writer.write([bytes(1000)]):
        num_written += 1
    assert RING_BYTES // 1100 < num_written < RING_BYTES // 1000
    assert not writer.write([bytes(1000)])
    assert reader.read() == [bytes(1000)]
    assert writer.write([b"again"])
    for _ in range(num_written - 1):
        assert reader.read() == [bytes(1000)]
    assert reader.read() == [b"again"]


def test_large_messages_leave_nothing_behind() -> None:
    """A message larger than the ring takes memory of its own, until it is read and another is written."""
    writer = RingWriter(0, 1)
    reader = RingReader(writer.name, 0, 1)
    assert writer.write([bytes(3 * RING_BYTES)])
    assert writer.has_spilled
    read = reader.read()
    assert read is not None
    assert bytes(read[0]) == bytes(3 * RING_BYTES)
    assert not writer.has_spilled
    assert writer.write([b"small"])
    assert not writer._spilled


def test_writer_and_reader_on_two_threads() -> None:
    writer = RingWriter(0, 1)
    reader = RingReader(writer.name, 0, 1)
    bell = own_bell(1)
    messages = [parts_of([number % 7000, 3], number) for number in range(3000)]
    seen: list[list[bytes]] = []

    def read_all() -> None:
        while len(seen) < len(messages):
            signal = bell.signal()
            parts = reader.read()
            if parts is None:
                bell.sleep(signal, 20.0)  # a wake-up that was missed would show
            else:
                seen.append([bytes(part) for part in parts])

    thread = threading.Thread(target=read_all)
    thread.start()
    for parts in messages:
        while not writer.write(parts):
            bell.ring()
        bell.ring()
    thread.join(15.0)
    assert not thread.is_alive()
    assert seen == messages


def test_nobody_is_woken_who_is_awake() -> None:
    """A sender rings only if no thread of the pool will look by itself; the word changes all the same."""
    bell = own_bell(2)
    bell.set_awake(1)
    signal = bell.signal()
    bell.ring()
    assert bell.signal() != signal
    bell.sleep(signal, 60.0)  # returns at once: there is a message


def test_memory_that_is_no_ring_is_not_written_to() -> None:
    """A peer names the memory: another piece of this worker's own, say, whose name it knows."""
    other = own_segment(8192)
    with pytest.raises(PeerError, match="as a ring, which has another length"):
        RingReader(other.name, 1, 0)


def test_memory_of_another_kind_is_no_ring_and_no_bell() -> None:
    """The page of a local group, say: a counter in it is not a peer's to change."""
    for num_bytes in (4096, mmap.PAGESIZE + RING_BYTES):
        for kind in ("weft", "weft-bell", "weft-ring"):
            other = own_segment(num_bytes, kind=kind)
            if kind != "weft-bell":
                with pytest.raises(PeerError, match="has freed memory that it had exposed"):
                    open_bell(other.name, 1, 0)
            with pytest.raises(PeerError):
                RingReader(other.name, 1, 0)
            assert not any(other.memory[:])


def test_a_ring_is_opened_once_and_by_its_reader() -> None:
    writer = RingWriter(3, 5)
    for peer_id, own_id in [(3, 4), (4, 5), (5, 3)]:
        with pytest.raises(PeerError, match="made by or for another worker"):
            RingReader(writer.name, peer_id, own_id)
    reader = RingReader(writer.name, 3, 5)
    with pytest.raises(PeerError, match="in use already"):
        RingReader(writer.name, 3, 5)
    assert writer.write([b"text"])
    assert reader.read() == [b"text"]
