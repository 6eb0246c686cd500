"""Activation checkpointing: forwards that run again in backward, inside sharded modules and around them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.fully_shard.models import WIDTH, Expert, as_whole, by_layer, every_module, filled
from tests.fully_shard.twins import Twin, make_rows
from tests.ranks import run_on
from weft import fully_shard

pytestmark = [
    run_on(threads=2, reshard=[True, False], use_reentrant=[False, True]),
    run_on(threads=4, reshard=[2], use_reentrant=[False, True]),
    run_on(gpu=2, reshard=[True], use_reentrant=[False, True]),
    run_on(nccl=2, reshard=[True], use_reentrant=[False]),
]

Reshard = bool | int | None


class Checkpointed(nn.Module):
    """Layers of which each runs again in backward, as a call from the model's forward."""

    def __init__(self, use_reentrant: bool, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(depth))
        self.use_reentrant = use_reentrant
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows * 2
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden


def needing_a_gradient(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Reentrant checkpoints must see an input that needs one."""
    return model(rows.clone().requires_grad_()).square().mean()


@run_on(gpu=4, reshard=[2], use_reentrant=[False], timeout=60, collective_timeout=20, also=True)
def test_around_sharded_modules(reshard: Reshard, use_reentrant: bool) -> None:
    for wrap in (by_layer, every_module, as_whole):
        twin = Twin(Checkpointed(use_reentrant), wrap, reshard_after_forward=reshard)
        twin.train(loss=needing_a_gradient)


class Inside(nn.Module):
    """Its own forward runs a part of itself again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, torch.tanh(rows), use_reentrant=self.use_reentrant)

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(rows)))


def test_inside_sharded_modules(reshard: Reshard, use_reentrant: bool) -> None:
    model = filled(nn.Sequential(Inside(use_reentrant), Inside(use_reentrant), nn.Linear(WIDTH, 2)))
    Twin(model, reshard_after_forward=reshard).train(loss=needing_a_gradient)


def test_wrapped_modules(reshard: Reshard, use_reentrant: bool) -> None:
    """With the checkpoint wrapper, applied before sharding: names have a part more."""
    kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT

    def wrap(model: Any, **options: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    model: Any = Plain()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=kind),
        check_fn=lambda module: isinstance(module, Expert),
    )
    Twin(model, wrap, reshard_after_forward=reshard).train(loss=needing_a_gradient)


class Plain(nn.Module):
    """Three layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(3))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + layer(rows)
        return rows


def test_composable(reshard: Reshard, use_reentrant: bool) -> None:
    """As hooks of the module itself, beside the hooks of fully_shard."""
    if use_reentrant:
        return  # there is no such kind

    def wrap(model: Any, **options: Any) -> None:
        for layer in model.layers:
            checkpoint_module(layer)
        by_layer(model, **options)

    Twin(Plain(), wrap, reshard_after_forward=reshard).train()


def test_the_whole_model(reshard: Reshard, use_reentrant: bool) -> None:
    """The root itself runs again."""
    twin = Twin(Plain(), by_layer, reshard_after_forward=reshard)

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        return checkpoint(model, rows, use_reentrant=use_reentrant).square().mean()

    twin.train(loss=loss)


def test_with_accumulation(reshard: Reshard, use_reentrant: bool) -> None:
    twin = Twin(Checkpointed(use_reentrant), reshard_after_forward=reshard)
    for step in range(2):
        twin.sharded.set_requires_gradient_sync(False)
        twin.backward(make_rows(10 * step), needing_a_gradient)
        twin.sharded.set_requires_gradient_sync(True)
        twin.backward(make_rows(10 * step + 1), needing_a_gradient)
        twin.check()
        twin.update()
