"""Ranks that use different modules in a step: no rank waits for another, and the mean is right.

A rank that did not use a parameter counts as a gradient of zero; a parameter that no
rank used keeps its gradient as it was, None unless there was one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.models import (
    WIDTH,
    Experts,
    Reader,
    as_whole,
    by_layer,
    every_module,
    filled,
    loss_by_rank,
)
from tests.fully_shard.twins import Twin, follow, make_rows
from tests.ranks import run_on
from weft import fully_shard

pytestmark = [
    run_on(threads=2, reshard=[True, False]),
    run_on(threads=4, reshard=[2]),
    run_on(gpu=2, reshard=[True, False]),
    run_on(nccl=2, reshard=[True]),
]

Reshard = bool | int | None


@run_on(gpu=4, reshard=[2], timeout=60, collective_timeout=20, also=True)
def test_other_experts(reshard: Reshard) -> None:
    """Each rank its own, from the first step on, another one in each step."""
    follow(
        Twin(Experts("abcd"), reshard_after_forward=reshard),
        [("a", "b", "c", "d"), ("b", "c", "d", "a"), ("a", "a", "b", "b"), ("d", "c")],
    )


def test_other_experts_after_a_common_step(reshard: Reshard) -> None:
    """The plan of the common step holds for no rank."""
    follow(
        Twin(Experts("abc"), reshard_after_forward=reshard),
        [("abc",), ("abc",), ("a", "b"), ("ab", "c"), ("abc",), ("", "abc")],
    )


def test_other_order(reshard: Reshard) -> None:
    follow(
        Twin(Experts("abc"), reshard_after_forward=reshard),
        [("abc", "cba"), ("cab", "bca"), ("abc",), ("abc", "acb")],
    )


def test_repeated_experts(reshard: Reshard) -> None:
    """One rank runs an expert several times in a forward, another once or not at all."""
    follow(
        Twin(Experts("ab"), reshard_after_forward=reshard),
        [("aab", "b"), ("a", "bbb"), ("abab", "ba"), ("", "aa"), ("ab",)],
    )


def test_a_rank_that_uses_nothing(reshard: Reshard) -> None:
    """There is no head: its backward reaches the input and no parameter."""
    follow(
        Twin(Experts("ab", has_head=False), reshard_after_forward=reshard),
        [("", "a"), ("ab", ""), ("a", "b"), ("", "ab"), ("ab",)],
    )


def test_nothing_used_by_anybody(reshard: Reshard) -> None:
    """Then there is nothing to reduce, and the next step goes on."""
    follow(
        Twin(Experts("ab", has_head=False), reshard_after_forward=reshard),
        [("ab",), ("",), ("", "a"), ("",), ("ab",)],
    )


def test_text_only_batches(reshard: Reshard) -> None:
    twin = Twin(Reader(), reshard_after_forward=reshard)
    for step, with_image in enumerate([(0,), (), (1,), (0, 1), (1,), ()]):

        def loss(model: nn.Module, rows: torch.Tensor, rank: int, with_image=with_image) -> torch.Tensor:
            return model(rows, rank in with_image).square().mean()

        twin.step(make_rows(step), loss)
        if not with_image:
            twin.check()


def test_parts_of_a_group(reshard: Reshard) -> None:
    """All in one group: ranks differ in the parameters they use, not in what is gathered."""
    follow(
        Twin(Experts("abc"), as_whole, reshard_after_forward=reshard),
        [("a", "b"), ("", "c"), ("ab", "a"), ("abc",)],
    )


def test_nested_groups(reshard: Reshard) -> None:
    follow(
        Twin(Experts("abc"), every_module, reshard_after_forward=reshard),
        [("ab", "c"), ("c", "ab"), ("", "a"), ("abc", "cba")],
    )


class Deep(nn.Module):
    """Experts in two layers, so that the ranks' plans part and meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts("ab", has_head=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        filled(self)

    def forward(self, rows: torch.Tensor, names: str) -> torch.Tensor:
        """The first letter is for the first layer, the second for the second; a dash is for none."""
        for layer, name in zip(self.layers, names, strict=True):
            rows = torch.tanh(layer(rows, name.strip("-")))
        return self.head(rows)


@run_on(gpu=4, reshard=[2], timeout=60, collective_timeout=20, also=True)
@run_on(nccl=4, reshard=[2], also=True)
def test_two_layers_of_experts(reshard: Reshard) -> None:
    def wrap(model: Any, **options) -> None:
        for layer in model.layers:
            by_layer(layer, **options)
        fully_shard(model, **options)

    follow(
        Twin(Deep(), wrap, reshard_after_forward=reshard),
        [("aa", "bb"), ("ab", "ba"), ("-a", "b-"), ("--", "ab"), ("aa",), ("ba", "aa")],
    )


def test_gradients_from_before(reshard: Reshard) -> None:
    """Nothing is set to None between: every step is reduced and added to what was there."""
    twin = Twin(Experts("abc"), reshard_after_forward=reshard)
    for step, names in enumerate([("a", "b"), ("b", "a"), ("c", "a"), ("ab",), ("", "c")]):
        twin.backward(make_rows(step), loss_by_rank(*names))
        twin.check()


def test_accumulated_without_sync(reshard: Reshard) -> None:
    """What a rank used before the sync only is reduced with the rest."""
    twin = Twin(Experts("abc"), reshard_after_forward=reshard)
    for step in range(2):
        twin.sharded.set_requires_gradient_sync(False)
        twin.backward(make_rows(10 * step), loss_by_rank("a", "b"))
        twin.backward(make_rows(10 * step + 1), loss_by_rank("", "a"))
        twin.sharded.set_requires_gradient_sync(True)
        twin.backward(make_rows(10 * step + 2), loss_by_rank("c"))
        twin.check()
        twin.update()


@run_on(threads=2, reshard=[True, False])
@run_on(threads=4, reshard=[2])
def test_each_rank_evaluates_its_own(reshard: Reshard) -> None:
    """Without gradients too: forwards through other modules."""
    twin = Twin(Experts("abc"), reshard_after_forward=reshard)
    rank = dist.get_rank()
    for step in range(3):
        rows = make_rows(step)
        with torch.no_grad():
            names = ["ab", "c", "", "abc"][(rank + step) % 4]
            seen, right = twin.sharded(rows, names), twin.single(rows, names)
            assert (seen - right).abs().max() <= 1e-12 * right.abs().max()
        twin.step(rows, loss_by_rank("a", "bc"))


@run_on(weft=2, gloo=2, reshard=[False, None], timeout=90, full=True)
@run_on(weft=4, gloo=4, reshard=[True, 2], timeout=90, full=True)
def test_all_of_these_in_one_job(reshard: Reshard) -> None:
    """On processes; starting a group costs more than most of them."""
    for test in (
        test_other_experts,
        test_other_experts_after_a_common_step,
        test_other_order,
        test_repeated_experts,
        test_a_rank_that_uses_nothing,
        test_nothing_used_by_anybody,
        test_text_only_batches,
        test_parts_of_a_group,
        test_nested_groups,
        test_two_layers_of_experts,
        test_gradients_from_before,
        test_accumulated_without_sync,
        test_each_rank_evaluates_its_own,
    ):
        test(reshard)
