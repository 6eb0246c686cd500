"""Training in which rank r makes 2 + r steps, and what a single process makes of the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.twins import Twin, make_rows, mean_square, rows_of
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
            grad: Any = param.grad
            param -= lr * grad
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
