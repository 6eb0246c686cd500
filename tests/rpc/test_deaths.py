"""Workers that die, stop or end without a word: everyone who needs them hears who it was, and soon."""

from __future__ import annotations

import signal
import time

import pytest

import weft
from tests.rpc import acts
from tests.rpc.acts import Sighting, call, count_at, see
from tests.rpc.crew import Crew, MemberGone
from tests.rpc.kills import kill_guests, kill_in_worlds
from tests.rpc.remote_functions import add, is_freed, make_tracked_at_gate, open_gate, pass_gate
from tests.rpc.workers import WEFT, wait_until

pytestmark = pytest.mark.processes

NOTICED_SECS = 2.0
SLACK_SECS = 1.0  # for a machine that has other things to do
WAITS = ["sync", "async", "to_here", "proxy"]


def check_named(seen: Sighting, rank: int, since_secs: float) -> None:
    """Fail unless the error names the worker, and came soon after it was gone or asked for."""
    assert seen.is_peer_error, seen
    assert seen.error == "PeerError", seen
    assert seen.ranks == (rank,), seen
    assert f"worker{rank}" in seen.text, seen
    noticed_secs = seen.raised_secs - max(since_secs, seen.entered_secs)
    assert noticed_secs < NOTICED_SECS + SLACK_SECS, f"noticed after {noticed_secs:.1f} s: {seen}"


def wait_for_visits(crew: Crew, rank: int, key: str, number: int) -> None:
    wait_until(lambda: crew[rank].do(count_at, f"worker{rank}", f"at gate {key}") == number, "all wait")


@pytest.mark.parametrize("victim", [2, 0], ids=["last", "first"])
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_worker_that_dies_is_named(how: str, victim: int) -> None:
    with Crew(3) as crew:
        crew.join()
        name = f"worker{victim}"
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            crew[rank].do(acts.hold_remote, "mine", name, acts.Counter)
        waiting = [crew[rank].begin(see, what, name, "gate") for rank in survivors for what in WAITS]
        wait_for_visits(crew, victim, "gate", len(waiting))
        died = time.monotonic()
        if how == "kill":
            crew[victim].kill()
        else:
            with pytest.raises(MemberGone):
                crew[victim].do(acts.run_exit)
        for future in waiting:
            seen = future.result(20)
            check_named(seen, victim, died)
            assert "may or may not have run" in seen.text, seen
        # Once it is known it is known: at once, for every use.
        for rank in survivors:
            for what in WAITS:
                check_named(crew[rank].do(see, what, name, "gate"), victim, died)
            for what in ["held to_here", "held proxy"]:
                check_named(crew[rank].do(see, what, "mine"), victim, died)
            with pytest.raises(weft.PeerError, match=name):
                crew[rank].do(call, victim, add, 1, 2)
        # Those who live go on together, and their end says who is missing.
        first, second = survivors
        assert crew[first].do(call, f"worker{second}", add, 1, 2) == 3
        ending = [crew[rank].begin(see, "shutdown") for rank in survivors]
        for future in ending:
            check_named(future.result(20), victim, died)
        for rank in survivors:
            assert crew[rank].do(acts.python_threads) == []
            assert set(crew[rank].do(acts.calls_after_shutdown)) >= {
                "RPC has not been initialized. Call weft.rpc.init_rpc first."
            }


def test_a_handler_that_ends_its_process() -> None:
    with Crew(3) as crew:
        crew.join()
        began = time.monotonic()
        with pytest.raises(weft.PeerError, match="worker1") as caught:
            crew[0].do(call, "worker1", acts.die_in_call)
        assert time.monotonic() - began < NOTICED_SECS + SLACK_SECS
        assert caught.value.ranks == (1,)
        assert "die_in_call" in str(caught.value)
        assert crew[1].wait_exit() == 4
        assert crew[0].do(call, "worker2", add, 1, 2) == 3


def test_one_dies_while_others_wait_in_shutdown() -> None:
    with Crew(3) as crew:
        crew.join()
        ending = [crew[rank].begin(see, "shutdown") for rank in (0, 1)]
        assert crew[2].do(call, "worker0", add, 1, 2) == 3  # they serve until all have come
        assert not any(future.done() for future in ending)
        died = time.monotonic()
        crew[2].kill()
        for rank, future in enumerate(ending):
            check_named(future.result(20), 2, died)
            assert crew[rank].do(acts.python_threads) == []


def test_two_die() -> None:
    with Crew(4) as crew:
        crew.join()
        waiting = [crew[rank].begin(see, "sync", f"worker{to}", "gate") for rank in (0, 1) for to in (2, 3)]
        wait_for_visits(crew, 2, "gate", 2)
        wait_for_visits(crew, 3, "gate", 2)
        died = time.monotonic()
        crew[2].signal(signal.SIGKILL)
        crew[3].signal(signal.SIGKILL)
        for future, victim in zip(waiting, [2, 3, 2, 3], strict=True):
            check_named(future.result(20), victim, died)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3


def test_a_stopped_worker_is_a_timeout_and_may_come_back() -> None:
    with Crew(2) as crew:
        crew.join()
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew[1].signal(signal.SIGSTOP)
        for what in ["sync", "async", "to_here"]:
            seen = crew[0].do(see, what, "worker1", "gate", 1.0)
            assert seen.error == "PeerTimeoutError", seen
            assert seen.ranks == (1,), seen
            assert "RPC ran for more than set timeout (1000 ms)" in seen.text, seen
            assert 0.95 < seen.raised_secs - seen.entered_secs < 1.0 + NOTICED_SECS, seen
        late = crew[0].begin(call, "worker1", add, 3, 4)
        crew[1].signal(signal.SIGCONT)
        assert late.result(20) == 7
        crew[1].do(call, "worker1", open_gate, WEFT, "gate")
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)


def test_an_rref_that_was_not_made_in_time() -> None:
    with Crew(2) as crew:
        crew.join()
        crew[1].signal(signal.SIGSTOP)
        first, second = crew[0].do(acts.remote_in_vain, "worker1", 0.5)
        crew[1].signal(signal.SIGCONT)
        assert "RPC ran for more than set timeout (500 ms)" in first
        assert "RRef creation via rpc.remote() timed out" in second
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)


def test_values_of_a_holder_that_died_are_freed() -> None:
    with Crew(3) as crew:
        crew.join()
        for key in ["a", "shared"]:
            crew[2].do(acts.hold_remote, key, "worker0", acts.make_tracked, key)
        crew[2].do(acts.send_held, "shared", "worker1")
        crew[2].do(acts.let_go, "shared")
        # One that is being made while its holder dies.
        early = crew[2].begin(acts.hold_remote, "early", "worker0", make_tracked_at_gate, WEFT, "early")
        wait_for_visits(crew, 0, "early", 1)
        assert not crew[1].do(call, "worker0", is_freed, WEFT, "a")
        crew[2].kill()
        with pytest.raises(MemberGone):
            early.result(20)
        wait_until(lambda: crew[1].do(call, "worker0", is_freed, WEFT, "a"), "a is freed")
        crew[1].do(call, "worker0", open_gate, WEFT, "early")
        wait_until(lambda: crew[1].do(call, "worker0", is_freed, WEFT, "early"), "early is freed")
        # What another holds too stays.
        assert not crew[1].do(call, "worker0", is_freed, WEFT, "shared")
        crew[1].do(acts.let_go, "shared")
        wait_until(lambda: crew[1].do(call, "worker0", is_freed, WEFT, "shared"), "shared is freed")


def test_a_caller_that_died_leaves_its_callee_at_work() -> None:
    with Crew(3) as crew:
        crew.join()
        crew[2].begin(call, "worker0", pass_gate, WEFT, "gate")
        wait_for_visits(crew, 0, "gate", 1)
        crew[2].kill()
        assert crew[1].do(call, "worker0", add, 1, 2) == 3
        crew[1].do(call, "worker0", open_gate, WEFT, "gate")  # its answer has no one to go to
        assert crew[1].do(call, "worker0", add, 1, 2) == 3
        assert crew[0].do(call, "worker1", add, 1, 2) == 3


def test_those_who_live_can_begin_again() -> None:
    with Crew(3) as crew:
        crew.join()
        crew[1].kill()
        for rank in (0, 2):
            crew[rank].do(see, "sync", "worker1", "gate")
            crew[rank].do(acts.leave, graceful=False)
        init_method = crew.meeting()
        joining = [
            crew[rank].begin(acts.join, f"again{new}", new, 2, init_method) for new, rank in [(0, 0), (1, 2)]
        ]
        for future in joining:
            future.result(20)
        assert crew[0].do(call, "again1", add, 1, 2) == 3
        assert crew[2].do(call, "again0", add, 1, 2) == 3
        for future in [crew[rank].begin(acts.leave) for rank in (0, 2)]:
            future.result(20)


def test_a_worker_that_never_comes() -> None:
    with Crew(1) as crew:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="1"):
            crew[0].do(acts.join, "worker0", 0, 2, crew.meeting(), rpc_timeout=1.5)
        assert 1.4 < time.monotonic() - began < 1.5 + NOTICED_SECS + SLACK_SECS
        assert crew[0].do(acts.python_threads) == []
        # And the process may still join another.
        crew[0].do(acts.join, "worker0", 0, 1, crew.meeting())
        assert crew[0].do(call, "worker0", add, 1, 2) == 3
        crew[0].do(acts.leave)


# -- twenty workers killed in a storm of calls; scripts/kills does it for as long as one likes --------


@pytest.mark.parametrize("seed", range(5))
def test_worlds_that_lose_all_but_one(seed: int) -> None:
    kill_in_worlds(seed)


def test_guests_of_a_late_group() -> None:
    kill_guests(10, seed=100)
