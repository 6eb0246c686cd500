"""Faults on thread-ranks: raise, hang and open, and what is refused."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.distributed as dist

import weft
from weft import comm
from weft.errors import ConfigError, LaunchError, PeerError
from weft.testing import Fault, inject, on_ranks, open_gate, random_fault


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
@on_ranks(1)
def test_a_fault_fires_at_its_call(fault: Fault, expected: list[str]) -> None:
    assert calls_until_raised(fault) == [*expected, "RuntimeError"]


@on_ranks(2)
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


def test_a_raised_fault_ends_the_launch() -> None:
    def body() -> None:
        with inject(Fault(1, "raise", op="all_reduce")):
            reduce_ones()

    with pytest.raises(LaunchError, match="rank 1 of 2 raised RuntimeError: rank 1: Fault") as caught:
        weft.launch(body, ranks=2, kind="thread", timeout=20)
    # Every rank's report says what was injected, also that of the rank which only lost its peer.
    for report in caught.value.failures.values():
        assert "injected: Fault(rank=1, action='raise', op='all_reduce')" in report


@on_ranks(1)
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


@on_ranks(1)
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
@on_ranks(2)
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


@on_ranks(1)
def test_a_fault_that_never_fired_is_an_error_also_after_another_error() -> None:
    with (
        pytest.raises(AssertionError, match="never fired") as caught,
        inject(Fault(0, "raise", op="broadcast")),
    ):
        raise KeyError("other")
    assert isinstance(caught.value.__cause__, KeyError)


@on_ranks(1)
def test_a_fault_may_be_allowed_not_to_fire() -> None:
    with inject(Fault(0, "raise", op="broadcast", must_fire=False)):
        reduce_ones()


@on_ranks(1)
def test_nothing_fires_after_the_block() -> None:
    with inject(Fault(0, "raise", call=1, must_fire=False)):
        reduce_ones()
    reduce_ones()
    assert comm.call.current_watchers() == ()


def reduce_alone(group: dist.ProcessGroup) -> None:
    """A call that no other rank can hold up."""
    comm.reduce(torch.ones(1), dist.get_rank(), group=group).wait()


def own_group() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


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
@on_ranks(1)
def test_what_would_end_the_process_is_refused_on_threads(action: str) -> None:
    with pytest.raises(ConfigError, match=f"would {action} the process of all thread-ranks"):
        inject(Fault(0, action)).__enter__()  # type: ignore[arg-type]
    assert comm.call.current_watchers() == ()


def test_it_is_refused_too_where_the_block_stands_around_the_launch() -> None:
    with (
        inject(Fault(1, "kill", op="all_reduce")),
        pytest.raises(LaunchError, match="would kill the process of all thread-ranks"),
    ):
        weft.launch(reduce_ones, ranks=2, kind="thread", timeout=20)


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


@on_ranks(2)
def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside this world of 2"):
        inject(Fault(2, "raise")).__enter__()


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
