"""Several backwards before an update, several forwards before a backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp_bodies.models import Experts, by_layer, net
from tests.fsdp_bodies.twins import Loss, Twin, make_rows, mean_square, rows_of, single_loss

Reshard = bool | int | None


def without_sync(reshard: Reshard) -> None:
    """Nothing is reduced until the last; until then the sharded gradients stay as they were."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(3):
        twin.sharded.set_requires_gradient_sync(False)
        for part in range(2):
            twin.backward(make_rows(10 * step + part))
            assert all(param.grad is None for param in twin.sharded.parameters())
        twin.sharded.set_requires_gradient_sync(True)
        twin.backward(make_rows(10 * step + 2))
        twin.check()
        twin.update()
        twin.assert_same_parameters()


def with_sync(reshard: Reshard) -> None:
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(4):
        twin.backward(make_rows(step))
        twin.check()
    twin.update()
    twin.train(1)


def zeroed_in_place(reshard: Reshard) -> None:
    """Gradients of zeros are added to."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check()
        for model in (twin.sharded, twin.single):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad(set_to_none=False)
            assert all(param.grad is not None for param in model.parameters())


def kept_gathered(reshard: Reshard) -> None:
    """With parameters kept after backward too, until the last."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(2):
        twin.sharded.set_requires_gradient_sync(False)
        twin.sharded.set_reshard_after_backward(False)
        twin.sharded.set_is_last_backward(False)
        twin.backward(make_rows(10 * step))
        twin.backward(make_rows(10 * step + 1))
        twin.sharded.set_requires_gradient_sync(True)
        twin.sharded.set_reshard_after_backward(True)
        twin.sharded.set_is_last_backward(True)
        twin.backward(make_rows(10 * step + 2))
        twin.check()
        twin.update()
        twin.assert_same_parameters()


def only_a_part_without_sync(reshard: Reshard) -> None:
    """recurse=False is about one module; the others are reduced each time."""
    twin = Twin(net(), reshard_after_forward=reshard)
    first = twin.sharded[0]
    first.set_requires_gradient_sync(False, recurse=False)
    twin.backward(make_rows(0))
    assert first.weight.grad is None
    assert twin.sharded[2].weight.grad is not None
    first.set_requires_gradient_sync(True, recurse=False)
    twin.backward(make_rows(1))
    twin.check()
    twin.update()
    twin.train(1)


def two_forwards(reshard: Reshard) -> None:
    """One backward for both: each module is used twice in the graph."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows).square().mean() + model(rows * 2 + 1).sum()

    Twin(net(), reshard_after_forward=reshard).train(loss=loss)


def two_forwards_then_two_backwards(reshard: Reshard) -> None:
    """Newest first or oldest first."""
    for is_newest_first in (True, False):
        twin = Twin(net(), reshard_after_forward=reshard)
        for step in range(2):
            rows = [make_rows(10 * step + part) for part in range(3)]
            for each in rows:
                single_loss(twin.single, each).backward()
            rank = dist.get_rank()
            losses = [mean_square(twin.sharded, rows_of(each, rank), rank) for each in rows]
            for loss in reversed(losses) if is_newest_first else losses:
                loss.backward()
            twin.check()
            twin.update()
            twin.assert_same_parameters()


def backward_twice(reshard: Reshard) -> None:
    """With retain_graph: the same gradients again."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(2):
        rows, rank = make_rows(step), dist.get_rank()
        for loss in (mean_square(twin.sharded, rows_of(rows, rank), rank), single_loss(twin.single, rows)):
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        twin.check()
        twin.update()


def chained(reshard: Reshard) -> None:
    """The model on its own output."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(torch.tanh(model(rows))).square().mean()

    Twin(net(), reshard_after_forward=reshard).train(loss=loss)


def gradients_of_inputs(reshard: Reshard) -> None:
    """The input's gradient is right too, with autograd.grad through frozen parameters as well."""
    twin = Twin(net(), reshard_after_forward=reshard)
    rows, rank = make_rows(), dist.get_rank()
    ours, single = (rows_of(rows, rank).clone().requires_grad_() for _ in range(2))
    twin.sharded(ours).square().sum().backward()
    twin.single(single).square().sum().backward()
    assert (ours.grad - single.grad).abs().max() <= 1e-13 * single.grad.abs().max()


def two_parts_of_a_loss(reshard: Reshard) -> None:
    """Backward of one output, then of another, of one forward; experts in one of them only."""
    twin = Twin(Experts("ab"), by_layer, reshard_after_forward=reshard)

    def losses(model: nn.Module, rows: torch.Tensor, rank: int) -> list[torch.Tensor]:
        return [model(rows, "a").square().mean(), model(rows, "ab").square().mean()]

    def nth(number: int) -> Loss:
        return lambda model, rows, rank: losses(model, rows, rank)[number]

    for step in range(2):
        rows, rank = make_rows(step), dist.get_rank()
        for number in (1, 0):
            single_loss(twin.single, rows, nth(number)).backward()
        for loss in reversed(losses(twin.sharded, rows_of(rows, rank), rank)):
            loss.backward()
        twin.check()
        twin.update()


BODIES: list[Callable[[Reshard], None]] = [
    without_sync,
    with_sync,
    zeroed_in_place,
    kept_gathered,
    only_a_part_without_sync,
    two_forwards,
    two_forwards_then_two_backwards,
    backward_twice,
    chained,
    gradients_of_inputs,
    two_parts_of_a_loss,
]
