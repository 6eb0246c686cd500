"""Whole training runs, equal to a single process on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.models import (
    WIDTH,
    Language,
    as_whole,
    by_layer,
    every_module,
    filled,
    make_tokens,
    net,
    next_token_loss,
)
from tests.fully_shard.twins import (
    Twin,
    all_ranks,
    assert_is_shard,
    assert_is_sharded,
    rows_of,
    single_loss,
)
from tests.ranks import run_on
from weft import FSDPModule
from weft.testing.models import TinyTransformer

pytestmark = [
    run_on(threads=2, reshard=[True, None]),
    run_on(threads=4, reshard=[2]),
]

Reshard = bool | int | None
ADAM_STEPS = 30


def train_with_adam(model: nn.Module, vocabulary: int, wrap: Callable[..., object], **options: Any) -> None:
    """30 steps beside a single process: losses, gradients' effects, parameters and Adam's state."""
    single = copy.deepcopy(model)
    wrap(model, **options)
    assert_is_sharded(model, single)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, fused=True) for m in (model, single)]
    losses, right_losses = [], []
    for step in range(ADAM_STEPS):
        tokens = make_tokens(step % 7, vocabulary)
        loss = next_token_loss(model, rows_of(tokens, dist.get_rank()))
        right = single_loss(single, tokens, next_token_loss)
        for each, kept in ((loss, losses), (right, right_losses)):
            each.backward()
            kept.append(each.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    means = [sum(of_a_step) / len(of_a_step) for of_a_step in zip(*all_ranks(losses), strict=True)]
    assert means == pytest.approx(right_losses, rel=1e-9)
    for (name, param), other in zip(model.named_parameters(), single.parameters(), strict=True):
        assert_is_shard(param, other, name, 1e-8)
        seen, wanted = optimizers[0].state[param], optimizers[1].state[other]
        assert_is_shard(seen["exp_avg_sq"], wanted["exp_avg_sq"], f"Adam's state of {name}", 1e-8)


@run_on(threads=2, reshard=[True, False, None])
@run_on(threads=4, reshard=[2])
@run_on(weft=2, gloo=2, reshard=[True], timeout=90)
@run_on(weft=4, gloo=4, reshard=[2], timeout=90, full=True)
def test_transformer(reshard: Reshard) -> None:
    """The embedding is the head, both in the root's group."""
    model: Any = TinyTransformer().double()
    train_with_adam(model, 16, by_blocks, reshard_after_forward=reshard)


@run_on(threads=2, reshard=[None])
@run_on(threads=4, reshard=[True])
def test_transformer_with_an_odd_vocabulary(reshard: Reshard) -> None:
    train_with_adam(Language(), 11, by_blocks, reshard_after_forward=reshard)


def by_blocks(model: Any, **options: Any) -> None:
    for block in model.blocks:
        as_whole(block, **options)
    as_whole(model, **options)
    assert all(isinstance(module, FSDPModule) for module in (model, *model.blocks))
    assert model.head.weight is model.embedding.weight


@run_on(threads=1, reshard=[True, False, None], also=True)
def test_each_wrapping(reshard: Reshard) -> None:
    for wrap in (by_layer, as_whole, every_module):
        Twin(net(), wrap, reshard_after_forward=reshard).train()


def test_large_layers(reshard: Reshard) -> None:
    """Past what backends treat as small."""
    model = nn.Sequential(nn.Linear(WIDTH, 500), nn.Tanh(), nn.Linear(500, 401), nn.Linear(401, 2))
    Twin(filled(model), reshard_after_forward=reshard).train(2)


def test_many_tiny_layers(reshard: Reshard) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(40)]
    groups = [nn.Sequential(*layers[start : start + 10]) for start in range(0, 40, 10)]
    Twin(filled(nn.Sequential(*groups)), reshard_after_forward=reshard).train(2)


def test_evaluation_between_steps(reshard: Reshard) -> None:
    """Forwards without gradients, under no_grad and in eval, leave training as it was."""
    twin = Twin(net(), reshard_after_forward=reshard)
    rows = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(3):
        twin.sharded.eval()
        with torch.no_grad():
            assert torch.allclose(twin.sharded(rows), twin.single(rows), rtol=1e-11, atol=0)
        twin.sharded.train()
        twin.train(1)


def test_forward_without_backward(reshard: Reshard) -> None:
    """Its output is dropped; the next step is as if it had not been."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(3):
        twin.sharded(torch.ones(step + 1, WIDTH, dtype=torch.float64))
        twin.train(1)


@run_on(weft=2, gloo=2, reshard=[None], timeout=90, full=True)
@run_on(weft=4, gloo=4, reshard=[False], timeout=90, full=True)
def test_other_ways_in_one_job(reshard: Reshard) -> None:
    """On processes; starting a group costs more than most of them."""
    for test in (
        test_each_wrapping,
        test_large_layers,
        test_many_tiny_layers,
        test_evaluation_between_steps,
        test_forward_without_backward,
    ):
        test(reshard)
