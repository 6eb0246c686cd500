"""Uneven inputs: ranks whose data ends go on holding, gathering and updating their shards.

Rank r makes 2 + r steps. Join is told what optimizes the shards of a rank that has no data
left: an optimizer, a function, hooks of the parameters, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp_bodies.models import Experts, by_layer, net
from tests.fsdp_bodies.twins import Twin, all_ranks, make_rows, mean_square, rows_of
from weft.join import Join

Scale = Callable[[int], float]


def num_steps(rank: int) -> int:
    return 2 + rank


def steps_in_all() -> int:
    return num_steps(dist.get_world_size() - 1)


def active_ranks(step: int) -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if step < num_steps(rank)]


def run_single(model: nn.Module, step: int, scale: Scale, loss: Any = mean_square) -> None:
    """What the ranks that have data left would make of it together."""
    rows = make_rows(step)
    losses = [loss(model, rows_of(rows, rank), rank) for rank in active_ranks(step)]
    (torch.stack(losses).mean() * scale(len(losses))).backward()


def by_active(num_active: int) -> float:
    return 1.0


def by_world(num_active: int) -> float:
    return num_active / dist.get_world_size()


def step_in_backward(model: nn.Module, lr: float = 0.1) -> None:
    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            param -= lr * param.grad
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)


def nothing() -> None:
    pass


def train_unevenly(
    twin: Twin,
    scale: Scale,
    loss: Any = mean_square,
    update: Callable[[], object] = nothing,
    update_single: Callable[[], object] = nothing,
    **options: Any,
) -> None:
    """Steps on the ranks that have data, each followed by `update`; then the same in a single process."""
    rank = dist.get_rank()
    with Join([twin.sharded], **options):
        for step in range(num_steps(rank)):
            loss(twin.sharded, rows_of(make_rows(step), rank), rank).backward()
            update()
    for step in range(steps_in_all()):
        run_single(twin.single, step, scale, loss)
        update_single()


def updater(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer with a memory, and what a loop does with it after backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, update


ACTIVE: dict[str, Any] = {"divide_by_initial_world_size": False}


def gradients() -> None:
    """Accumulated over all steps, on the ranks that had no data too; the mean is over the whole world."""
    twin = Twin(net())
    train_unevenly(twin, by_world, optimizer=None)
    twin.check()
    twin.update()
    twin.train(2)  # evenly again


def gradients_of_the_active() -> None:
    """The mean over the ranks that had data."""
    twin = Twin(net())
    train_unevenly(twin, by_active, optimizer=None, **ACTIVE)
    twin.check()


def an_optimizer() -> None:
    for reshard in (True, False):
        twin = Twin(net(), reshard_after_forward=reshard)
        optimizer, update = updater(twin.sharded)
        train_unevenly(
            twin, by_world, update=update, update_single=updater(twin.single)[1], optimizer=optimizer
        )
        twin.assert_same_parameters()
        twin.sharded.zero_grad()
        twin.single.zero_grad()
        twin.train(1)


def a_function() -> None:
    twin = Twin(net())
    _, update = updater(twin.sharded)
    train_unevenly(twin, by_world, update=update, update_single=updater(twin.single)[1], optimizer=update)
    twin.assert_same_parameters()


def an_optimizer_in_backward() -> None:
    """A rank without data makes no step of its own, but the hooks of its parameters are called."""
    twin = Twin(net())
    step_in_backward(twin.sharded)
    step_in_backward(twin.single)
    train_unevenly(twin, by_world, optimizer=None)
    twin.assert_same_parameters()


def the_switch_is_off() -> None:
    """Even inputs, and a Join that does nothing."""
    twin = Twin(net())
    rank = dist.get_rank()
    with Join([twin.sharded], enable=False):
        for step in range(2):
            mean_square(twin.sharded, rows_of(make_rows(step), rank), rank).backward()
    for step in range(2):
        losses = [
            mean_square(twin.single, rows_of(make_rows(step), r), r) for r in range(dist.get_world_size())
        ]
        torch.stack(losses).mean().backward()
    twin.check()


def even_inputs() -> None:
    twin = Twin(net())
    rank = dist.get_rank()
    with Join([twin.sharded], optimizer=None):
        for step in range(3):
            twin.backward(make_rows(step))
    twin.check()
    assert len(set(all_ranks(rank))) == dist.get_world_size()


def other_experts() -> None:
    """Uneven inputs and ranks that use different modules."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows, ["a", "b", "ab", ""][rank]).square().mean()

    twin = Twin(Experts("ab"), by_layer)
    step_in_backward(twin.sharded)
    step_in_backward(twin.single)
    train_unevenly(twin, by_world, loss, optimizer=None)
    twin.assert_same_parameters()


def accumulation_without_sync() -> None:
    """Every other backward is not reduced; ranks make whole pairs of them."""
    twin = Twin(net())
    rank, size = dist.get_rank(), dist.get_world_size()
    with Join([twin.sharded], optimizer=None):
        for step in range(num_steps(rank)):
            for is_last in (False, True):
                twin.sharded.set_requires_gradient_sync(is_last)
                rows = make_rows(10 * step + is_last)
                mean_square(twin.sharded, rows_of(rows, rank), rank).backward()
    for step in range(steps_in_all()):
        for is_last in (False, True):
            rows = make_rows(10 * step + is_last)
            losses = [mean_square(twin.single, rows_of(rows, r), r) for r in active_ranks(step)]
            (torch.stack(losses).sum() / size).backward()
    twin.check()


BODIES: list[Callable[[], None]] = [
    gradients,
    gradients_of_the_active,
    an_optimizer,
    a_function,
    an_optimizer_in_backward,
    the_switch_is_off,
    even_inputs,
    other_experts,
    accumulation_without_sync,
]
