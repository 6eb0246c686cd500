"""What Join promises, and what it does where something is odd: hooks that don't fit, errors, nesting, groups.

In the first part rank r has 3 + r inputs, in the second 1 + r.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.join.joinables import AFTER, BEFORE, Ones, expected_total
from tests.ranks import run_on
from weft import ConfigError, DesyncError, DistributedDataParallel, StateError, record
from weft.join import Join, Joinable, JoinHook

NUM_STEPS = 3
PROMISED = run_on(threads=(2, 4), weft=(2, 4), gloo=(2, 4), timeout=60)

pytestmark = [run_on(threads=(2, 4), timeout=60), run_on(weft=4, gloo=4, timeout=60, full=True)]


def run(
    num_joinables: int, num_allreduces: int = 1, *, is_uneven: bool = True, **options: bool
) -> list[Ones]:
    """Loop under Join; check the total of all all-reduces."""
    joinables = [Ones() for _ in range(num_joinables)]
    assert all(one.post_value.item() == BEFORE for one in joinables)
    num_inputs = NUM_STEPS + (dist.get_rank() if is_uneven else 0)
    total = 0.0
    with Join(joinables, num_allreduces=num_allreduces, **options):
        for _ in range(num_inputs):
            total += sum(one(num_allreduces) for one in joinables)
    expected = expected_total(NUM_STEPS, 1) if is_uneven else dist.get_world_size() * NUM_STEPS
    assert total == expected * num_joinables * num_allreduces
    return joinables


@PROMISED
def test_one_main_hook() -> None:
    (one,) = run(1)
    assert one.hook is not None
    assert one.hook.num_shadowed == dist.get_world_size() - 1 - dist.get_rank()


@PROMISED
def test_one_post_hook() -> None:
    (one,) = run(1, num_allreduces=0, run_post_hooks=True)
    assert one.post_value.item() == AFTER
    assert one.is_last_joiner == (dist.get_rank() == dist.get_world_size() - 1)


@PROMISED
def test_main_and_post_hook() -> None:
    (one,) = run(1, run_post_hooks=True)
    assert one.post_value.item() == AFTER


@PROMISED
def test_three_joinables() -> None:
    for one in run(3, run_post_hooks=True):
        assert one.post_value.item() == AFTER


@PROMISED
def test_disabled() -> None:
    (one,) = run(1, is_uneven=False, enable=False)
    assert one.hook is not None
    assert one.hook.num_shadowed == 0
    assert one.is_last_joiner is None


@PROMISED
def test_three_disabled() -> None:
    run(3, is_uneven=False, enable=False)


@PROMISED
@pytest.mark.parametrize("num_joinables", [1, 3])
def test_throws(num_joinables: int) -> None:
    message = (
        "Rank 0 exhausted all inputs."
        if dist.get_rank() == 0
        else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    )
    with pytest.raises(RuntimeError, match=message):
        run(num_joinables, throw_on_early_termination=True)
    dist.barrier()  # the group is still good


@PROMISED
def test_kwargs_reach_hooks() -> None:
    run(1, num_allreduces=2)


# Oddities


def loop(join: Join, body: Callable[[int], object]) -> None:
    """Rank r makes 1 + r steps."""
    with join:
        for step in range(1 + dist.get_rank()):
            body(step)


def test_hook_that_does_too_little() -> None:
    one = Ones()
    with pytest.raises(DesyncError, match="a step of the active ranks makes more collectives"):
        loop(Join([one], num_allreduces=1), lambda step: one(num_allreduces=2))
    dist.barrier()


def test_hook_that_does_too_much() -> None:
    one = Ones()
    with pytest.raises(DesyncError, match="a main hook makes more collectives"):
        loop(Join([one], num_allreduces=2), lambda step: one(num_allreduces=1))
    dist.barrier()


def test_the_same_join_again() -> None:
    one = Ones()
    join = Join([one])
    for _ in range(3):
        with join as entered:
            assert entered is join
            assert sum(one() for _ in range(2 + dist.get_rank())) == expected_total(2)
        assert one() == dist.get_world_size()  # no longer under Join


def test_entered_twice() -> None:
    join = Join([Ones()])
    with join, pytest.raises(StateError, match="entered already"):
        join.__enter__()


def test_an_inner_loop_per_step() -> None:
    outer, inner = Ones(), Ones()
    rank, size = dist.get_rank(), dist.get_world_size()
    with Join([outer]):
        for _ in range(2):
            assert outer() == size
            with Join([inner]):
                assert sum(inner() for _ in range(2 + rank)) == expected_total(2)


def test_an_inner_loop_after_a_rank_left() -> None:
    outer, inner = Ones(), Ones()

    def body(step: int) -> None:
        outer()
        with Join([inner]):
            inner()

    with pytest.raises(StateError, match="A Join inside a Join"):
        loop(Join([outer]), body)
    dist.barrier()


def test_two_joins_around_one_loop() -> None:
    outer, inner = Ones(), Ones()
    with Join([outer]), Join([inner]):
        with pytest.raises(StateError, match="Pass all objects that communicate in the loop to one Join"):
            outer()
        inner()


def test_joinables_in_another_order() -> None:
    first, second = Ones(), Ones()
    with Join([first, second]), pytest.raises(StateError, match="in the order in which the loop uses them"):
        second()
    dist.barrier()


def test_an_error_passes_through() -> None:
    one = Ones()

    def body(step: int) -> None:
        one()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        loop(Join([one]), body)
    assert one.hook is not None
    assert one.hook.num_shadowed == 0
    assert one() == dist.get_world_size()  # and nothing is left of the Join


def test_groups_that_differ() -> None:
    other = dist.new_group()
    with pytest.raises(ValueError, match="Using join context manager with multiple process groups"):
        Join([Ones(), Ones(other)])


def test_a_group_beside_the_world() -> None:
    """A Join on one group sees calls on another one of the same ranks."""
    group = dist.new_group()
    one = Ones(group)  # it notifies on the group and reduces on the world
    with Join([one]):
        for step in range(1 + dist.get_rank()):
            assert one() == dist.get_world_size() - step
            value = torch.ones(2)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [dist.get_world_size() - step] * 2


@run_on(threads=4, timeout=60)
@run_on(weft=4, gloo=4, timeout=60, full=True)
def test_pairs_that_join_apart() -> None:
    """Calls on a group that lacks some of the Join's ranks are none of its business."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mine = pairs[rank // 2]
    one = PairOnes(mine)
    with Join([one]):
        for step in range(1 + rank % 2):
            assert one() == 2 - step
            alone = torch.ones(1)
            dist.all_reduce(alone, group=mine)
            assert alone.item() == 2 - step


class PairOnes(Ones):
    """Reduces on its own group."""

    def __call__(self, num_allreduces: int = 1) -> float:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one, group=self.group)
        return one.item()

    def join_hook(self, **kwargs: Any) -> Any:
        hook: Any = super().join_hook(**kwargs)
        hook.main_hook = lambda: dist.all_reduce(torch.zeros(1), group=self.group)
        return hook


@run_on(threads=4, timeout=60)
@run_on(weft=4, gloo=4, timeout=60, full=True)
def test_a_rank_that_calls_something_else() -> None:
    """Active ranks that differ are told, not left waiting: the joined rank is, too."""
    one = Ones()

    def body(step: int) -> None:
        one()
        if step == 1:
            dist.all_reduce(torch.ones(2 if dist.get_rank() == 1 else 3))

    with pytest.raises(DesyncError, match="different collectives"):
        loop(Join([one]), body)
    dist.barrier()


@run_on(weft=4, timeout=60)
def test_a_thousand_steps_more() -> None:
    """On processes alone: threads share the list of warnings."""
    one = Ones()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join([one], num_allreduces=0):
            for _ in range(1100 if dist.get_rank() == dist.get_world_size() - 1 else 0):
                one(num_allreduces=0)
    skews = [str(entry.message) for entry in caught if "uneven input skew" in str(entry.message)]
    if dist.get_rank() == 0:
        assert len(skews) == 1
        assert "rank 0 has at least 1000 fewer inputs" in skews[0]


def test_one_word_a_step_while_all_are_active() -> None:
    one = Ones()
    with record() as events, Join([one]):
        for _ in range(5):
            one()
    words = events.by_feature("join")
    assert [(event.op, event.shapes) for event in words] == [("all_reduce", ((1,),))] * (
        5 + 1
    )  # the last: joined


def test_handles_count_the_active_ranks() -> None:
    one = Ones()
    with Join([one], num_allreduces=0):
        for step in range(1 + dist.get_rank()):
            handle = Join.notify_join_context(one)
            assert handle is not None
            assert handle.wait().tolist() == [dist.get_world_size() - step]
    assert Join.notify_join_context(one) is None


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="requires at least one joinable"):
        Join([])
    with pytest.raises(ConfigError, match="Linear, which is not a Joinable"):
        Join([torch.nn.Linear(1, 1)])  # type: ignore[list-item]
    one = Ones()
    with pytest.raises(ConfigError, match="twice"):
        Join([one, one])
    with pytest.raises(ConfigError, match="constructor calls the ``Joinable`` constructor"):
        Join.notify_join_context(object())  # type: ignore[arg-type]


@run_on()
@pytest.mark.threads
def test_the_classes_of_groups_are_left_as_they_were() -> None:
    classes = (dist.ProcessGroup, weft.LocalGroup)
    before = [dict(vars(cls)) for cls in classes]
    during: list[bool] = []

    def body() -> None:
        with Join([Ones()]):
            during.append(weft.LocalGroup.allreduce is not before[1]["allreduce"])

    weft.launch(body, ranks=2, kind="thread")
    assert during == [True, True]
    assert [dict(vars(cls)) for cls in classes] == before


@run_on(threads=1)
def test_a_world_of_one_communicates_nothing() -> None:
    one = Ones()
    with record() as events, Join([one], num_allreduces=0, run_post_hooks=True):
        handle = Join.notify_join_context(one)
        assert handle is not None
        assert handle.wait().tolist() == [1]
    assert events == []
    assert one.is_last_joiner


# On a GPU


class Counting(Joinable):
    """Communicates nothing of its own."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@run_on(gpu=(2, 4), gpu_threads=(2, 4), nccl=(2, 4), timeout=120)
def test_handles_count_the_active_ranks_for_every_stream() -> None:
    size = dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(3, 1).cuda())
    with Join([model]):
        for _ in range(3):
            model(torch.ones(2, 3, device="cuda")).sum().backward()
    one = Counting()
    with Join([one]):
        for step in range(2 + dist.get_rank()):
            handle = Join.notify_join_context(one)
            assert handle is not None
            expected = size - max(0, step - 1)
            with torch.cuda.stream(torch.cuda.Stream()):
                assert (handle.wait() * 2).tolist() == [2 * expected]
            assert handle.wait().tolist() == [expected]
