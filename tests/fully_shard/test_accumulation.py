"""Several backwards before an update, several forwards before a backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fully_shard.models import Experts, by_layer, net
from tests.fully_shard.twins import Loss, Twin, make_rows, mean_square, rows_of, single_loss
from tests.ranks import run_on
from weft.errors import StateError

pytestmark = [
    run_on(threads=2, reshard=[True, False]),
    run_on(threads=4, reshard=[2]),
    run_on(gpu=2, nccl=2, reshard=[True]),
]

Reshard = bool | int | None


def test_without_sync(reshard: Reshard) -> None:
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


def test_with_sync(reshard: Reshard) -> None:
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(4):
        twin.backward(make_rows(step))
        twin.check()
    twin.update()
    twin.train(1)


def test_zeroed_in_place(reshard: Reshard) -> None:
    """Gradients of zeros are added to."""
    twin = Twin(net(), reshard_after_forward=reshard)
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check()
        for model in (twin.sharded, twin.single):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad(set_to_none=False)
            assert all(param.grad is not None for param in model.parameters())


def test_kept_gathered(reshard: Reshard) -> None:
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


def test_finalized_by_call(reshard: Reshard) -> None:
    """Reduced behind the last backward, by a call: gradients, and parameters that are shards again."""
    twin = Twin(net(), reshard_after_forward=reshard)
    model = twin.sharded
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None  # before the first forward: nothing to do
    for step in range(3):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        for part in range(2):
            twin.backward(make_rows(10 * step + part))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        with torch.no_grad():
            handle = model.finalize_backward(async_op=step > 0)
        assert (handle is not None) == (step > 0)
        if handle is not None:
            handle.wait()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        twin.check()
        model.finalize_backward()  # nothing is left
        twin.check()
        twin.update()
        twin.assert_same_parameters()
    model.set_manual_backward_finalization(False)
    twin.train(1)


def test_not_finalized(reshard: Reshard) -> None:
    """Without the mode, inside of a backward, and on a part: refused, and the next step is right."""
    twin = Twin(net(), reshard_after_forward=reshard)
    model = twin.sharded
    with pytest.raises(StateError, match="requires manual backward finalization"):
        model.finalize_backward()
    twin.train(1)
    for call in (model[0].finalize_backward, lambda: model[0].set_manual_backward_finalization(True)):
        with pytest.raises(StateError, match="must be called on the root FSDP module"):
            call()
    model.set_manual_backward_finalization(True)
    for call, said in (
        (model.finalize_backward, "after backward completes"),
        (lambda: model.set_manual_backward_finalization(False), "cannot change mode during backward"),
    ):
        start = torch.zeros((), requires_grad=True) * 1
        start.register_hook(lambda _, call=call: call())
        with pytest.raises(StateError, match=said):
            start.backward()
    twin.train(1)


def test_only_a_part_without_sync(reshard: Reshard) -> None:
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


def test_two_forwards(reshard: Reshard) -> None:
    """One backward for both: each module is used twice in the graph."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows).square().mean() + model(rows * 2 + 1).sum()

    Twin(net(), reshard_after_forward=reshard).train(loss=loss)


def test_two_forwards_then_two_backwards(reshard: Reshard) -> None:
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


def test_backward_twice(reshard: Reshard) -> None:
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


def test_chained(reshard: Reshard) -> None:
    """The model on its own output."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(torch.tanh(model(rows))).square().mean()

    Twin(net(), reshard_after_forward=reshard).train(loss=loss)


def test_gradients_of_inputs(reshard: Reshard) -> None:
    """The input's gradient is right too, with autograd.grad through frozen parameters as well."""
    twin = Twin(net(), reshard_after_forward=reshard)
    rows, rank = make_rows(), dist.get_rank()
    ours, single = (rows_of(rows, rank).clone().requires_grad_() for _ in range(2))
    twin.sharded(ours).square().sum().backward()
    twin.single(single).square().sum().backward()
    assert ours.grad is not None
    assert single.grad is not None
    assert (ours.grad - single.grad).abs().max() <= 1e-13 * single.grad.abs().max()


def test_two_parts_of_a_loss(reshard: Reshard) -> None:
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
