"""Parameters without a gradient: on some ranks, on all, in some steps; with the flag and without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import ON_TORCH, weft_only
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    filled,
    gradients_of,
    make_rows,
    mean_square,
    net,
)
from tests.ranks import run_on

pytestmark = run_on(threads=2)


def every_option() -> Iterator[Any]:
    for find in [True] if ON_TORCH else [True, False]:  # torch raises without the flag
        for view in (False, True):
            for cap in (0.0001, 25):
                options = {
                    "find_unused_parameters": find,
                    "gradient_as_bucket_view": view,
                    "bucket_cap_mb": cap,
                }
                is_everyday = (view, cap) == (False, 0.0001) or (find, view, cap) == (False, True, 25)
                marks = () if is_everyday else FULL
                yield pytest.param(options, id=f"find={find}-view={view}-cap={cap}", marks=marks)


OPTIONS = pytest.mark.parametrize("options", list(every_option()))
FIND = pytest.mark.parametrize("find", [True] if ON_TORCH else [True, False])


@OPTIONS
def test_one_used_by_some_ranks_gets_the_mean_over_all(options: dict[str, Any]) -> None:
    twin = Twin(Branches("abc"), **options)
    for step in range(3):
        twin.step(make_rows(step), loss_by_rank("ab", "b"))


@OPTIONS
@run_on(threads=4)
def test_each_rank_uses_another_one(options: dict[str, Any]) -> None:
    twin = Twin(Branches("abcde"), **options)
    for step in range(3):
        twin.step(make_rows(step), loss_by_rank("a", "b", "c", "d"))


@OPTIONS
def test_one_used_by_nobody_has_no_gradient(options: dict[str, Any]) -> None:
    twin = Twin(Branches("abc"), **options)
    for step in range(3):
        twin.backward(make_rows(step), loss_by_rank("a"))
        assert gradients_of(twin.parallel)["branches.c.weight"] is None
        twin.check()
        twin.update()


@OPTIONS
def test_what_is_used_changes_by_step_and_rank(options: dict[str, Any]) -> None:
    twin = Twin(Branches("abc"), **options)
    schedule = [("abc",), ("a", "b"), ("b", "a"), ("", "c"), ("c",), ("abc", ""), ("cba",)]
    for step, names in enumerate(schedule):
        twin.step(make_rows(step), loss_by_rank(*names))


@OPTIONS
def test_a_gradient_from_before_stays_where_nobody_used_it(options: dict[str, Any]) -> None:
    if ON_TORCH and options["gradient_as_bucket_view"]:
        pytest.skip("torch averages what was there before")
    twin = Twin(Branches("ab"), **options)
    before = torch.full_like(twin.parallel.module.branches["b"].weight, float(3 + dist.get_rank()))
    for step in range(3):
        twin.parallel.module.branches["b"].weight.grad = before.clone()
        twin.backward(make_rows(step), loss_by_rank("a"))
        assert torch.equal(twin.parallel.module.branches["b"].weight.grad, before)
        twin.single.branches["b"].weight.grad = before.clone()
        twin.check()
        twin.update(lr=0.0)


@FIND
def test_gradients_accumulate_over_steps_that_use_different_ones(find: bool) -> None:
    """Each backward is synced; nothing is set to None between."""
    twin = Twin(Branches("abc"), find_unused_parameters=find)
    for step, names in enumerate([("a", "b"), ("b", "a"), ("c", "a"), ("ab",)]):
        twin.backward(make_rows(step), loss_by_rank(*names))
        twin.check()


@FIND
def test_one_used_only_under_no_sync_is_reduced_with_the_rest(find: bool) -> None:
    twin = Twin(Branches("abc"), find_unused_parameters=find)
    with twin.parallel.no_sync():
        twin.backward(make_rows(1), loss_by_rank("a", "b"))
    twin.backward(make_rows(2), loss_by_rank("c"))
    twin.check()
    twin.update()
    twin.step(make_rows(3), loss_by_rank("c", "a"))


class Gated(nn.Module):
    """A layer that a rank may go around: then its output comes from the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = filled(nn.Linear(WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor, is_open: bool) -> torch.Tensor:
        return self.layer(rows) if is_open else rows * 2


@weft_only("waits for ever")
@FIND
def test_a_rank_that_uses_no_parameter_at_all_takes_part(find: bool) -> None:
    """Its backward reaches the input, which needs a gradient, and no parameter."""
    twin = Twin(Gated(), find_unused_parameters=find)
    for step, users in enumerate([(0, 1), (1,), (0,), (0, 1), ()]):

        def loss(model: nn.Module, rows: torch.Tensor, rank: int, users=users) -> torch.Tensor:
            return model(rows.clone().requires_grad_(), rank in users).square().mean()

        twin.step(make_rows(step), loss)


@weft_only("waits for ever")
@FIND
def test_a_rank_that_uses_no_parameter_in_the_first_step_takes_part(find: bool) -> None:
    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows.clone().requires_grad_(), rank == 1).square().mean()

    twin = Twin(Gated(), find_unused_parameters=find)
    for step in range(2):
        twin.step(make_rows(step), loss)


@pytest.mark.parametrize("cap", [0.0001, 25])
def test_skip_all_reduce_unused_params_is_accepted(cap: float) -> None:
    twin = Twin(
        Branches("abc"), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=cap
    )
    for step in range(3):
        twin.step(make_rows(step), loss_by_rank("ab"))


def test_the_flag_changes_nothing_where_all_are_used() -> None:
    twin = Twin(net(), find_unused_parameters=True)
    for step in range(3):
        twin.step(make_rows(step), mean_square)


@pytest.mark.skipif(ON_TORCH, reason="torch's calls are not recorded")
def test_every_rank_makes_the_same_calls_whatever_it_uses() -> None:
    twin = Twin(Branches("abc"), bucket_cap_mb=0.0001)
    with weft.record() as events:
        for step in range(3):
            twin.step(make_rows(step), loss_by_rank("ab", "c"))
    events.sort(key=lambda event: event.start_secs)
    # A broadcast's root gives what the others get.
    calls = [(event.op, max(event.bytes_in, event.bytes_out), event.dtype) for event in events]
    first, *others = all_ranks(calls)
    assert first
    assert all(other == first for other in others)
