"""How long a thread looks for messages before it sleeps, on a clock that the test moves."""

from __future__ import annotations

from functools import partial

import pytest

from weft.rpc import looking
from weft.rpc.looking import Lookout

TICK_SECS = 0.00001


class Clock:
    """Each look costs a tick; `slow_secs` is what giving way costs beside it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slow_secs = 0.0
        self.num_runnable = 0

    def monotonic(self) -> float:
        return self.now

    def yield_core(self) -> None:
        self.now += TICK_SECS + self.slow_secs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(looking, "time", clock)
    monkeypatch.setattr(looking, "kernel", clock)
    monkeypatch.setattr(looking, "num_runnable", lambda: clock.num_runnable)
    return clock


def make(*, has_cores: bool = True) -> Lookout:
    lookout = Lookout()
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


def test_a_machine_with_more_to_do_than_cores_is_not_looked_on_for_long(clock: Clock) -> None:
    lookout = make()
    moment_secs = look_in_vain(lookout, clock)
    lookout.note_woken()
    clock.num_runnable = 1000
    assert look_in_vain(lookout, clock) == pytest.approx(moment_secs)
    clock.num_runnable = 1
    clock.now += 0.01
    assert look_in_vain(lookout, clock) > 10 * moment_secs


def test_the_system_says_how_many_want_to_run() -> None:
    assert looking.num_runnable() >= 1


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
