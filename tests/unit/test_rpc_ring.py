"""Messages through a ring in shared memory: in order, whole, and never more than fit."""

from __future__ import annotations

import threading
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.rpc.bell import own_bell
from weft.rpc.ring import RING_BYTES, RingReader, RingWriter

SIZES = st.one_of(st.integers(0, 64), st.integers(0, 40_000), st.integers(200_000, 400_000))
STEPS = st.lists(st.one_of(st.lists(SIZES, min_size=1, max_size=12), st.none()), max_size=60)


def parts_of(sizes: list[int], number: int) -> list[bytes]:
    return [bytes([(number + place) % 251]) * size for place, size in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_ring_is_a_queue(steps: list[list[int] | None]) -> None:
    """None reads a message, a list of sizes writes one. What does not fit is refused whole."""
    writer = RingWriter()
    reader = RingReader(writer.name, 0)
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
    writer = RingWriter()
    reader = RingReader(writer.name, 0)
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
    writer = RingWriter()
    reader = RingReader(writer.name, 0)
    assert writer.write([bytes(3 * RING_BYTES)])
    assert writer.has_spilled
    read = reader.read()
    assert read is not None
    assert bytes(read[0]) == bytes(3 * RING_BYTES)
    assert not writer.has_spilled
    assert writer.write([b"small"])
    assert not writer._spilled


def test_writer_and_reader_on_two_threads() -> None:
    writer = RingWriter()
    reader = RingReader(writer.name, 0)
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
