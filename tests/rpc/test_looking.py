"""How threads wait for messages: they look for a while, then sleep until a bell rings. Messages in a ring."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PeerError
from weft.local import kernel
from weft.local.segment import own_segment
from weft.rpc import looking
from weft.rpc.bell import open_bell, own_bell
from weft.rpc.looking import Lookout
from weft.rpc.ring import RING_BYTES, RingReader, RingWriter

# -- how long a thread looks before it sleeps, on a clock that the test moves ------------------------


TICK_SECS = 0.00001


class Clock:
    """Each look costs a tick; `slow_secs` is what giving way costs beside it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slow_secs = 0.0
        self.num_moves = 0

    def monotonic(self) -> float:
        return self.now

    def yield_core(self) -> None:
        self.now += TICK_SECS + self.slow_secs

    def leave_core(self) -> None:
        self.num_moves += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(looking, "time", clock)
    monkeypatch.setattr(looking, "kernel", clock)
    return clock


def make(*, has_cores: bool = True, gives_way: bool = False) -> Lookout:
    lookout = Lookout(gives_way=gives_way)
    lookout.allow(is_on=True, has_cores=has_cores)
    return lookout


def look_in_vain(lookout: Lookout, clock: Clock) -> float:
    began_at = clock.now
    assert not lookout.look(lambda: False, lambda: False)
    return clock.now - began_at


def test_it_does_not_look_where_it_must_not(clock: Clock) -> None:
    assert look_in_vain(Lookout(), clock) == 0.0
    assert not Lookout().look(lambda: True, lambda: False)


def test_a_message_that_came_soon_makes_the_next_look_longer(clock: Clock) -> None:
    lookout = make()
    short_secs = look_in_vain(lookout, clock)
    clock.now += 0.0005
    lookout.note_woken()
    long_secs = look_in_vain(lookout, clock)
    assert long_secs > 10 * short_secs
    clock.now += 1.0
    lookout.note_woken()  # nobody has asked for a long time
    assert look_in_vain(lookout, clock) == pytest.approx(short_secs)


def test_a_message_ends_the_look(clock: Clock) -> None:
    lookout = make()
    comes_at = clock.now + 5 * TICK_SECS
    assert lookout.look(lambda: clock.now >= comes_at, lambda: False)
    assert clock.now == pytest.approx(comes_at)


def test_it_ends_when_it_need_not_look_any_more(clock: Clock) -> None:
    lookout, began_at = make(), clock.now
    assert not lookout.look(lambda: False, lambda: clock.now > began_at)
    assert clock.now == pytest.approx(began_at + TICK_SECS)


def test_without_a_core_for_everyone_only_messages_that_come_soon_are_looked_for(clock: Clock) -> None:
    lookout = make(has_cores=False)
    assert look_in_vain(lookout, clock) == 0.0
    clock.now += 0.0005
    lookout.note_woken()
    assert look_in_vain(lookout, clock) > 0.001


def test_who_had_to_wait_for_the_core_pauses(clock: Clock) -> None:
    lookout = make(has_cores=False)
    pauses = [crowd(lookout, clock) for _ in range(12)]
    assert pauses[0] < 0.005
    assert pauses[1] == pytest.approx(2 * pauses[0], rel=0.2)
    assert pauses[-1] == pytest.approx(pauses[-2], rel=0.2)
    assert 0.1 < pauses[-1] < 0.4
    for _ in range(100):  # nobody has needed the core for long
        assert lookout.look(lambda: True, lambda: False)
    assert crowd(lookout, clock) == pytest.approx(pauses[0], rel=0.2)


def take_turns(lookout: Lookout, clock: Clock, turn_secs: float, num_looks: int) -> None:
    """Looks in which a message comes after another thread's turn on the core."""
    for _ in range(num_looks):
        clock.slow_secs, comes_at = turn_secs, clock.now + TICK_SECS
        assert lookout.look(partial(_is_past, clock, comes_at), lambda: False)
    clock.slow_secs = 0.0


def test_who_shares_a_core_with_the_one_it_talks_to_moves(clock: Clock) -> None:
    lookout = make(gives_way=True)
    take_turns(lookout, clock, 0.00005, 2)
    assert clock.num_moves == 0  # it may have been an accident
    take_turns(lookout, clock, 0.00005, 1)
    assert clock.num_moves == 1
    take_turns(lookout, clock, 0.00005, 20)
    assert clock.num_moves == 1  # it takes a while until that shows
    clock.now += 0.05
    take_turns(lookout, clock, 0.00005, 3)
    assert clock.num_moves == 2


def test_of_two_that_talk_only_one_moves(clock: Clock) -> None:
    take_turns(make(gives_way=False), clock, 0.00005, 50)
    assert clock.num_moves == 0


def test_short_turns_of_other_threads_move_nobody(clock: Clock) -> None:
    lookout = make(gives_way=True)
    take_turns(lookout, clock, 0.00001, 50)
    for _ in range(50):
        take_turns(lookout, clock, 0.0002, 2)
        take_turns(lookout, clock, 0.0, 1)
    assert clock.num_moves == 0


def test_only_the_turn_before_the_message_counts(clock: Clock) -> None:
    """Any thread may have the core for a moment; only the sender's turn ends with a message."""
    lookout = make(gives_way=True)
    for _ in range(50):
        began_at = clock.now
        clock.slow_secs = 0.0002

        def comes_after_quiet_turns(began_at: float = began_at) -> bool:
            if clock.now > began_at:
                clock.slow_secs = 0.0
            return clock.now > began_at + 0.0002 + 3 * TICK_SECS

        lookout._is_chat = True
        assert lookout.look(comes_after_quiet_turns, lambda: False)
    assert clock.num_moves == 0


def test_short_turns_make_nobody_pause(clock: Clock) -> None:
    lookout = make(has_cores=False)
    lookout._is_chat = True
    take_turns(lookout, clock, 0.0002, 30)
    assert look_in_vain(lookout, clock) > 0.001


def test_a_move_that_does_not_help_is_followed_by_a_pause(clock: Clock) -> None:
    lookout = make(has_cores=False, gives_way=True)
    lookout._is_chat = True
    take_turns(lookout, clock, 0.003, 1)
    assert clock.num_moves == 1
    assert look_in_vain(lookout, clock) > 0.001
    take_turns(lookout, clock, 0.003, 1)  # too soon to move again
    assert clock.num_moves == 1
    assert look_in_vain(lookout, clock) == 0.0


def test_a_look_that_was_cut_short_does_not_count_as_given_up(clock: Clock) -> None:
    lookout = make(has_cores=False)
    lookout._is_chat = True
    assert not lookout.look(lambda: False, partial(_is_past, clock, clock.now))
    lookout.note_woken()  # by a message that nobody looked for in vain
    assert look_in_vain(lookout, clock) == 0.0


def test_the_thread_that_moves_keeps_the_cores_it_may_use() -> None:
    cores = os.sched_getaffinity(0)
    kernel.leave_core()
    assert os.sched_getaffinity(0) == cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("core", sorted(os.sched_getaffinity(0))[:3])
def test_a_thread_moves_to_another_core(core: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[set[int]] = []
    monkeypatch.setattr(kernel, "_libc", SimpleNamespace(sched_getcpu=lambda: core))
    monkeypatch.setattr(kernel.os, "sched_setaffinity", lambda _, cores: allowed.append(set(cores)))
    kernel.leave_core()
    cores = os.sched_getaffinity(0)
    assert allowed == [cores - {core}, cores]


def test_a_thread_that_may_not_choose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(kernel.os, "sched_setaffinity", refuse)
    kernel.leave_core()


def test_a_moment_is_looked_in_any_case_where_there_are_cores(clock: Clock) -> None:
    lookout = make()
    moment_secs = look_in_vain(lookout, clock)
    for _ in range(5):
        crowd(lookout, clock)
    clock.slow_secs = 0.003
    look_in_vain(lookout, clock)
    clock.slow_secs = 0.0
    lookout.note_woken()
    assert look_in_vain(lookout, clock) == pytest.approx(moment_secs)


def crowd(lookout: Lookout, clock: Clock) -> float:
    """Let a long look wait for its turn; for how long there is none after it."""
    lookout._is_chat = True  # messages have come soon
    clock.slow_secs = 0.003
    assert look_in_vain(lookout, clock) == pytest.approx(TICK_SECS + clock.slow_secs)
    clock.slow_secs = 0.0
    began_at, longest_secs = clock.now, 0.0
    while longest_secs < 0.0002 and clock.now < began_at + 1.0:
        clock.now += 0.0002
        before = clock.now
        lookout.look(lambda: False, partial(_is_past, clock, before + 0.0003))
        longest_secs = clock.now - before
    return clock.now - began_at


def _is_past(clock: Clock, when: float) -> bool:
    return clock.now > when


# -- messages through a ring in shared memory: in order, whole, and never more than fit --------------


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
