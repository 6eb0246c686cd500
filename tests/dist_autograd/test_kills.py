"""Workers killed in the middle of a pass: the root soon hears who it was; nobody waits or keeps a context."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest

from tests.dist_autograd import deaths
from tests.dist_autograd.deaths import End
from tests.rpc import acts
from tests.rpc.acts import count_at
from tests.rpc.crew import Crew, MemberGone
from tests.rpc.workers import wait_until

pytestmark = pytest.mark.processes

NOTICED_SECS = 2.0
SLACK_SECS = 1.0  # for a machine that has other things to do
AT_GATE = f"at gate {deaths.GATE}"


def set_up(crew: Crew) -> None:
    crew.join()
    for rank, member in enumerate(crew.members):
        member.do(deaths.plant_here, rank)


def check_named(end: End, victim: int, died_secs: float) -> None:
    assert end.is_peer_error, end
    assert end.ranks == (victim,), end
    assert f"worker{victim}" in end.text, end
    assert end.ended_secs - died_secs < NOTICED_SECS + SLACK_SECS, (end.ended_secs - died_secs, end)


def check_free(crew: Crew, victim: int) -> None:
    """Survivors have no context and no pass, and can make up a new group that works."""
    survivors = [member for rank, member in enumerate(crew.members) if rank != victim]
    for member in survivors:
        wait_until(lambda member=member: member.do(deaths.counts_here) == (0, 0), "nothing is left", 5.0)
    for member in survivors:
        member.do(acts.leave, False)
    init_method, size = crew.meeting(), len(survivors)
    joining = [
        member.begin(acts.join, f"worker{i}", i, size, init_method) for i, member in enumerate(survivors)
    ]
    for i, (member, future) in enumerate(zip(survivors, joining, strict=True)):
        future.result(20)
        member.do(deaths.plant_here, i)
    for i, member in enumerate(survivors):
        other = f"worker{1 - i}"
        for exact in [False, True]:
            end = member.do(deaths.run_pass, [other, f"worker{i}", other], True, exact)
            assert not end.error, end
        member.do(deaths.pass_through, other, f"worker{i}")


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(
    ("busy", "victim"),
    [(2, 2), (2, 1), (1, 1), (1, 2)],
    ids=["the last", "the middle, done", "the middle", "the last, not yet reached"],
)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "in turn"])
def test_killed_in_a_pass(busy: int, victim: int, exact: bool, nested: bool) -> None:
    """worker0 is the root of a chain over both others; one of them is busy in its part of the backward."""
    hops = [2, 1] if not nested else [1, 2]
    with Crew(3) as crew:
        set_up(crew)
        crew[busy].do(deaths.gate_here)
        root = crew[0].begin(deaths.run_pass, [f"worker{rank}" for rank in hops], nested, exact)
        wait_until(lambda: crew[busy].do(count_at, f"worker{busy}", AT_GATE) == 1, "its part has begun")
        died = time.monotonic()
        crew[victim].kill()
        check_named(root.result(30), victim, died)
        if busy != victim:
            crew[busy].do(deaths.open_here, f"worker{busy}")
        check_free(crew, victim)


@pytest.mark.parametrize("busy", [1, 2])
def test_the_root_is_killed(busy: int) -> None:
    """Those who work for it end their parts, and free its contexts."""
    with Crew(3) as crew:
        set_up(crew)
        crew[busy].do(deaths.gate_here)
        root = crew[0].begin(deaths.run_pass, ["worker1", "worker2"], True, False)
        wait_until(lambda: crew[busy].do(count_at, f"worker{busy}", AT_GATE) == 1, "its part has begun")
        assert [crew[rank].do(deaths.counts_here)[0] for rank in (1, 2)] == [1, 1]
        crew[0].kill()
        with pytest.raises(MemberGone):
            root.result(20)
        crew[busy].do(deaths.open_here, f"worker{busy}")
        check_free(crew, 0)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("victim", [1, 2])
def test_killed_before_the_pass(victim: int, exact: bool) -> None:
    """Its part of the graph is gone, and the backward says so."""
    with Crew(3) as crew:
        set_up(crew)
        root = crew[0].begin(deaths.run_pass, ["worker1", "worker2"], True, exact, "forward")
        wait_until(lambda: crew[0].do(count_at, "worker0", "at gate forward") == 1, "forward is done")
        crew[victim].kill()
        crew[0].do(acts.see, "sync", f"worker{victim}", "gate")
        gone = time.monotonic()
        crew[0].do(deaths.open_here, "worker0", "forward")
        check_named(root.result(30), victim, gone)
        check_free(crew, victim)


def test_one_that_takes_no_part() -> None:
    """Its death is none of the pass's business."""
    with Crew(3) as crew:
        set_up(crew)
        crew[1].do(deaths.gate_here)
        root = crew[0].begin(deaths.run_pass, ["worker1"], False, False)
        wait_until(lambda: crew[1].do(count_at, "worker1", AT_GATE) == 1, "its part has begun")
        crew[2].kill()
        crew[0].do(acts.see, "sync", "worker2", "gate")
        crew[1].do(deaths.open_here, "worker1")
        end = root.result(30)
        assert not end.error, end
        check_free(crew, 2)


def test_killed_in_a_call() -> None:
    """In the forward: the call's error is the one that leaves the block, and the context is gone."""
    with Crew(3) as crew:
        set_up(crew)
        caller = crew[0].begin(deaths.call_in_context, "worker1")
        wait_until(lambda: crew[1].do(count_at, "worker1", AT_GATE) == 1, "the call has begun")
        died = time.monotonic()
        crew[1].kill()
        check_named(caller.result(30), 1, died)
        check_free(crew, 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_passes(seed: int) -> None:
    """All workers run passes over all, and one is killed at a moment that chance picks."""
    chance = random.Random(seed)
    with Crew(3) as crew:
        set_up(crew)
        victim = chance.randrange(3)
        workers = [f"worker{rank}" for rank in range(3)]
        storms = {rank: crew[rank].begin(deaths.storm, workers, seed * 10 + rank) for rank in range(3)}
        threading.Event().wait(chance.uniform(0.05, 0.5))
        died = time.monotonic()
        crew[victim].kill()
        for rank, future in storms.items():
            if rank == victim:
                with suppress(MemberGone):
                    future.result(20)
                continue
            _num_right, end = future.result(60)
            check_named(end, victim, died)
        check_free(crew, victim)
