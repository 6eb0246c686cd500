"""Join where something is odd: hooks that don't fit, errors inside the block, nesting, other groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.join_bodies.reducers import Ones, expected_total
from weft import ConfigError, DesyncError, StateError, record
from weft.join import Join


def loop(join: Join, body: Callable[[int], object]) -> None:
    """Rank r makes 1 + r steps."""
    with join:
        for step in range(1 + dist.get_rank()):
            body(step)


def hook_that_does_too_little() -> None:
    one = Ones()
    with pytest.raises(DesyncError, match="a step of the active ranks makes more collectives"):
        loop(Join([one], num_allreduces=1), lambda step: one(num_allreduces=2))
    dist.barrier()


def hook_that_does_too_much() -> None:
    one = Ones()
    with pytest.raises(DesyncError, match="a main hook makes more collectives"):
        loop(Join([one], num_allreduces=2), lambda step: one(num_allreduces=1))
    dist.barrier()


def the_same_join_again() -> None:
    one = Ones()
    join = Join([one])
    for _ in range(3):
        with join as entered:
            assert entered is join
            assert sum(one() for _ in range(2 + dist.get_rank())) == expected_total(2)
        assert one() == dist.get_world_size()  # no longer under Join


def entered_twice() -> None:
    join = Join([Ones()])
    with join, pytest.raises(StateError, match="entered already"):
        join.__enter__()


def an_inner_loop_per_step() -> None:
    outer, inner = Ones(), Ones()
    rank, size = dist.get_rank(), dist.get_world_size()
    with Join([outer]):
        for _ in range(2):
            assert outer() == size
            with Join([inner]):
                assert sum(inner() for _ in range(2 + rank)) == expected_total(2)


def an_inner_loop_after_a_rank_left() -> None:
    outer, inner = Ones(), Ones()

    def body(step: int) -> None:
        outer()
        with Join([inner]):
            inner()

    with pytest.raises(StateError, match="A Join inside a Join"):
        loop(Join([outer]), body)
    dist.barrier()


def two_joins_around_one_loop() -> None:
    outer, inner = Ones(), Ones()
    with Join([outer]), Join([inner]):
        with pytest.raises(StateError, match="Pass all objects that communicate in the loop to one Join"):
            outer()
        inner()


def joinables_in_another_order() -> None:
    first, second = Ones(), Ones()
    with Join([first, second]), pytest.raises(StateError, match="in the order in which the loop uses them"):
        second()
    dist.barrier()


def an_error_passes_through() -> None:
    one = Ones()

    def body(step: int) -> None:
        one()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        loop(Join([one]), body)
    assert one.hook is not None
    assert one.hook.num_shadowed == 0
    assert one() == dist.get_world_size()  # and nothing is left of the Join


def groups_that_differ() -> None:
    other = dist.new_group()
    with pytest.raises(ValueError, match="Using join context manager with multiple process groups"):
        Join([Ones(), Ones(other)])


def a_group_beside_the_world() -> None:
    """A Join on one group sees calls on another one of the same ranks."""
    group = dist.new_group()
    one = Ones(group)  # it notifies on the group and reduces on the world
    with Join([one]):
        for step in range(1 + dist.get_rank()):
            assert one() == dist.get_world_size() - step
            value = torch.ones(2)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [dist.get_world_size() - step] * 2


def pairs_that_join_apart() -> None:
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
        hook = super().join_hook(**kwargs)
        hook.main_hook = lambda: dist.all_reduce(torch.zeros(1), group=self.group)
        return hook


def a_rank_that_calls_something_else() -> None:
    """Active ranks that differ are told, not left waiting: the joined rank is, too."""
    if dist.get_world_size() < 3:
        return
    one = Ones()

    def body(step: int) -> None:
        one()
        if step == 1:
            dist.all_reduce(torch.ones(2 if dist.get_rank() == 1 else 3))

    with pytest.raises(DesyncError, match="different collectives"):
        loop(Join([one]), body)
    dist.barrier()


def a_thousand_steps_more() -> None:
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


def one_word_a_step_while_all_are_active() -> None:
    one = Ones()
    with record() as events, Join([one]):
        for _ in range(5):
            one()
    words = events.by_feature("join")
    assert [(event.op, event.shapes) for event in words] == [("all_reduce", ((1,),))] * (
        5 + 1
    )  # the last: joined


def handles_count_the_active_ranks() -> None:
    one = Ones()
    with Join([one], num_allreduces=0):
        for step in range(1 + dist.get_rank()):
            handle = Join.notify_join_context(one)
            assert handle is not None
            assert handle.wait().tolist() == [dist.get_world_size() - step]
    assert Join.notify_join_context(one) is None


def checks() -> None:
    with pytest.raises(ValueError, match="requires at least one joinable"):
        Join([])
    with pytest.raises(ConfigError, match="Linear, which is not a Joinable"):
        Join([torch.nn.Linear(1, 1)])  # type: ignore[list-item]
    one = Ones()
    with pytest.raises(ConfigError, match="twice"):
        Join([one, one])
    with pytest.raises(ConfigError, match="constructor calls the ``Joinable`` constructor"):
        Join.notify_join_context(object())  # type: ignore[arg-type]


BODIES = [
    hook_that_does_too_little,
    hook_that_does_too_much,
    the_same_join_again,
    entered_twice,
    an_inner_loop_per_step,
    an_inner_loop_after_a_rank_left,
    two_joins_around_one_loop,
    joinables_in_another_order,
    an_error_passes_through,
    groups_that_differ,
    a_group_beside_the_world,
    a_rank_that_calls_something_else,
    one_word_a_step_while_all_are_active,
    handles_count_the_active_ranks,
    checks,
]
FOR_PROCESSES = [a_thousand_steps_more]  # threads share the list of warnings
FOR_FOUR = [pairs_that_join_apart]
