"""Faults: what they fit, where they raise, hang, open, kill and stop, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on
from weft import comm
from weft.comm.call import current_watchers
from weft.errors import ConfigError, LaunchError, PeerError
from weft.testing import Fault, inject, open_gate, random_fault, shared_pool


def test_a_fault_prints_as_the_code_that_makes_it() -> None:
    fault = Fault(rank=1, action="kill", op="all_reduce", call=3)
    assert repr(fault) == "Fault(rank=1, action='kill', op='all_reduce', call=3)"
    assert eval(repr(fault)) == fault


@pytest.mark.parametrize(
    ("fault", "is_at_call"),
    [
        (Fault(rank=0, action="kill"), True),
        (Fault(rank=0, action="kill", call=2), True),
        (Fault(rank=0, action="kill", op="barrier", step=1), True),
        (Fault(rank=0, action="kill", feature="ddp", step=1), True),
        (Fault(rank=0, action="kill", call=0, step=1), True),
        (Fault(rank=0, action="kill", step=1), False),
    ],
)
def test_a_step_alone_is_the_step_itself(fault: Fault, is_at_call: bool) -> None:
    assert fault.is_at_call == is_at_call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "explode"}, "action must be one of"),
        ({"action": "kill", "error": ValueError()}, "error is for action='raise'"),
        ({"action": "kill", "call": -1}, "call counts from 0; got -1"),
        ({"action": "kill", "step": -2}, "step counts from 0; got -2"),
    ],
)
def test_a_fault_that_can_not_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(rank=0, **arguments)  # type: ignore[arg-type]


def test_a_seed_always_draws_the_same_fault() -> None:
    draws = [random_fault(seed, ranks=4, ops=["all_reduce", "broadcast"], calls=5) for seed in range(200)]
    again = [random_fault(seed, ranks=4, ops=["all_reduce", "broadcast"], calls=5) for seed in range(200)]
    assert draws == again
    assert {fault.rank for fault in draws} == {0, 1, 2, 3}
    assert {fault.op for fault in draws} == {"all_reduce", "broadcast"}
    assert {fault.call for fault in draws} == {0, 1, 2, 3, 4}
    assert {fault.action for fault in draws} == {"kill", "stop"}


def test_a_drawn_fault_tells_its_seed_and_can_be_made_again() -> None:
    fault = random_fault(7, ranks=[1, 2], calls=3, actions=["raise"])
    assert "seed=7" in repr(fault)
    assert eval(repr(fault)) == fault
    assert fault.rank in (1, 2)
    assert fault.op is None


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="calls=0"):
        random_fault(0, ranks=2, calls=0)


# On ranks that are threads


def reduce_ones(feature: str = "user") -> float:
    return comm.all_reduce(torch.ones(2), feature=feature).wait().sum().item()


def calls_until_raised(fault: Fault, num_calls: int = 6) -> list[str]:
    """Make calls of two kinds, two a step; list those that went through."""
    done: list[str] = []
    with inject(fault) as faults:
        for step in faults.steps(num_calls // 2):
            for op, call in [("all_reduce", reduce_ones), ("barrier", lambda: comm.barrier().wait())]:
                try:
                    call()
                    done.append(f"{op} {step}")
                except (RuntimeError, PeerError) as error:
                    done.append(type(error).__name__)
                    return done
    return done


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(0, "raise"), []),
        (Fault(0, "raise", call=3), ["all_reduce 0", "barrier 0", "all_reduce 1"]),
        (Fault(0, "raise", op="barrier"), ["all_reduce 0"]),
        (Fault(0, "raise", op="barrier", call=1), ["all_reduce 0", "barrier 0", "all_reduce 1"]),
        (Fault(0, "raise", op="barrier", step=1), ["all_reduce 0", "barrier 0", "all_reduce 1"]),
        (Fault(0, "raise", step=1, call=1), ["all_reduce 0", "barrier 0", "all_reduce 1"]),
        (
            Fault(0, "raise", feature="user", step=2),
            ["all_reduce 0", "barrier 0", "all_reduce 1", "barrier 1"],
        ),
    ],
    ids=repr,
)
@run_on(threads=1, timeout=60)
def test_a_fault_fires_at_its_call(fault: Fault, expected: list[str]) -> None:
    assert calls_until_raised(fault) == [*expected, "RuntimeError"]


@run_on(threads=2, timeout=60)
def test_only_its_rank_fails_and_the_others_name_it() -> None:
    rank = dist.get_rank()
    error = ValueError("injected")
    with inject(Fault(1, "raise", op="all_reduce", call=1, error=error)) as faults:
        assert reduce_ones() == 4.0
        if rank == 1:
            with pytest.raises(ValueError, match="injected"):
                reduce_ones()
            assert [fault.rank for fault in faults.fired] == [1]
        else:
            assert faults.fired == ()


@pytest.mark.threads
def test_a_raised_fault_ends_the_launch() -> None:
    def body() -> None:
        with inject(Fault(1, "raise", op="all_reduce")):
            reduce_ones()

    with pytest.raises(LaunchError, match="rank 1 of 2 raised RuntimeError: rank 1: Fault") as caught:
        weft.launch(body, ranks=2, kind="thread", timeout=20)
    # Every rank's report says what was injected, also that of the rank which only lost its peer.
    for report in caught.value.failures.values():
        assert "injected: Fault(rank=1, action='raise', op='all_reduce')" in report


@run_on(threads=1, timeout=60)
def test_a_step_alone_fires_as_it_begins() -> None:
    seen: list[int] = []
    with inject(Fault(0, "raise", step=2, error=KeyError("two"))) as faults:
        for _ in range(2):
            seen.append(faults.next_step())
            reduce_ones()
        with pytest.raises(KeyError, match="two"):
            faults.next_step()
        seen.append(faults.next_step())
    assert seen == [0, 1, 3]


@run_on(threads=1, timeout=60)
def test_the_feature_is_looked_at() -> None:
    with inject(Fault(0, "raise", feature="ddp")):
        reduce_ones("fsdp")
        with pytest.raises(RuntimeError, match="fired at"):
            reduce_ones("ddp")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(1, "raise", op="all_reduce", call=2), "2 calls fitted it"),
        (Fault(1, "raise", op="broadcast"), "0 calls fitted it"),
        (Fault(1, "raise", step=2), "2 steps were begun"),
    ],
    ids=repr,
)
@run_on(threads=2, timeout=60)
def test_a_fault_that_never_fired_is_an_error_on_its_rank(fault: Fault, message: str) -> None:
    def body() -> None:
        with inject(fault) as faults:
            for _ in faults.steps(2):
                reduce_ones()

    if dist.get_rank() == 1:
        with pytest.raises(AssertionError, match=f"{re.escape(repr(fault))}: {message}") as caught:
            body()
        assert "2 all_reduce by rank 1" in str(caught.value)
    else:
        body()


@run_on(threads=1, timeout=60)
def test_a_fault_that_never_fired_is_an_error_also_after_another_error() -> None:
    with (
        pytest.raises(AssertionError, match="never fired") as caught,
        inject(Fault(0, "raise", op="broadcast")),
    ):
        raise KeyError("other")
    assert isinstance(caught.value.__cause__, KeyError)


@run_on(threads=1, timeout=60)
def test_a_fault_may_be_allowed_not_to_fire() -> None:
    with inject(Fault(0, "raise", op="broadcast", must_fire=False)):
        reduce_ones()


@run_on(threads=1, timeout=60)
def test_nothing_fires_after_the_block() -> None:
    with inject(Fault(0, "raise", call=1, must_fire=False)):
        reduce_ones()
    reduce_ones()
    assert current_watchers() == ()


def reduce_alone(group: dist.ProcessGroup) -> None:
    """A call that no other rank can hold up."""
    comm.reduce(torch.ones(1), dist.get_rank(), group=group).wait()


def own_group() -> dist.ProcessGroup:
    groups: list[Any] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.threads
def test_a_rank_hangs_until_its_gate_opens() -> None:
    passed = threading.Event()

    def body() -> None:
        group = own_group()
        with inject(Fault(1, "hang", op="reduce", gate="late")):
            if dist.get_rank() == 1:
                reduce_alone(group)
                passed.set()
            else:
                assert not passed.wait(timeout=0.3)
                open_gate("other")
                assert not passed.wait(timeout=0.1)
                open_gate("late")
                assert passed.wait(timeout=20)

    weft.launch(body, ranks=2, kind="thread", timeout=30)


@pytest.mark.threads
def test_a_gate_is_opened_by_the_call_of_another_rank() -> None:
    num_calls = 0

    def body() -> int:
        nonlocal num_calls
        group = own_group()
        with inject(Fault(0, "hang", op="reduce"), Fault(1, "open", op="reduce", call=2)):
            if dist.get_rank() == 0:
                reduce_alone(group)
                return num_calls
            for _ in range(3):
                reduce_alone(group)
                num_calls += 1
        return 0

    # Rank 0 went on when rank 1 had made two calls and was at, or past, the third.
    assert weft.launch(body, ranks=2, kind="thread", timeout=30)[0] in (2, 3)


@pytest.mark.parametrize("action", ["kill", "stop", "exit"])
@run_on(threads=1, timeout=60)
def test_what_would_end_the_process_is_refused_on_threads(action: str) -> None:
    with pytest.raises(ConfigError, match=f"would {action} the process of all thread-ranks"):
        inject(Fault(0, action)).__enter__()  # type: ignore[arg-type]
    assert current_watchers() == ()


@pytest.mark.threads
def test_it_is_refused_too_where_the_block_stands_around_the_launch() -> None:
    with (
        inject(Fault(1, "kill", op="all_reduce")),
        pytest.raises(LaunchError, match="would kill the process of all thread-ranks"),
    ):
        weft.launch(reduce_ones, ranks=2, kind="thread", timeout=20)


@pytest.mark.threads
def test_a_block_around_a_launch_of_threads_counts_each_rank_apart() -> None:
    def body() -> int:
        group = own_group()
        for done in faults.steps(3):
            try:
                reduce_alone(group)
            except ValueError:
                return done
        return 3

    with inject(Fault(1, "raise", call=2, error=ValueError())) as faults:
        assert weft.launch(body, ranks=2, kind="thread", timeout=20) == [3, 2]


@run_on(threads=2, timeout=60)
def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside this world of 2"):
        inject(Fault(2, "raise")).__enter__()


@pytest.mark.threads
def test_a_random_fault_can_be_replayed_from_the_error() -> None:
    fault = random_fault(11, ranks=2, ops=["all_reduce"], calls=3, actions=["raise"])

    def body() -> None:
        with inject(fault):
            for _ in range(3):
                reduce_ones()

    with pytest.raises(LaunchError) as caught:
        weft.launch(body, ranks=2, kind="thread", timeout=20)
    printed = re.findall(r"injected: (Fault\(.*\))", str(caught.value))
    assert printed
    assert {eval(text) for text in printed} == {fault}
    assert "seed=11" in printed[0]


# On processes, which they end


def reduce_five_times(fault: Fault) -> None:
    with inject(fault):
        for _ in range(5):
            comm.all_reduce(torch.ones(4)).wait()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("action", "headline"),
    [("kill", "died: killed by SIGKILL"), ("exit", "died: exited with code 1")],
)
def test_a_rank_dies_at_its_call_and_the_other_names_it(action: Any, headline: str) -> None:
    fault = Fault(1, action, op="all_reduce", call=3)
    with pytest.raises(LaunchError) as caught:
        shared_pool(2).run(reduce_five_times, args=(fault,), timeout=30)
    failures = caught.value.failures
    assert headline in failures[1]
    assert "PeerError" in failures[0]
    assert "rank 1" in failures[0]
    # The rank that died can tell nothing any more: the others say what was injected.
    assert f"injected: {fault!r}" in failures[0]


@pytest.mark.processes
@pytest.mark.full
def test_a_stopped_rank_goes_on_when_it_is_continued() -> None:
    pool = shared_pool(2)

    def body(pids: list[int]) -> float:
        with inject(Fault(1, "stop", op="all_reduce")):
            if dist.get_rank() == 0:
                # The parent's SIGCHLD is the launcher's; the peer asks the kernel.
                while _state_of(pids[1]) != "T":
                    os.sched_yield()
                os.kill(pids[1], signal.SIGCONT)
            return comm.all_reduce(torch.ones(1)).wait().item()

    assert pool.run(body, args=(pool.pids,), timeout=30) == [2.0, 2.0]


def _state_of(pid: int) -> str:
    """The kernel's letter for what a process does; T: stopped by a signal."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
