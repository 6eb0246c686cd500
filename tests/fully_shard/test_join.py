"""Uneven inputs: ranks whose data ends go on holding, gathering and updating their shards.

Join is told what optimizes the shards of a rank that has no data left: an optimizer, a function, hooks of the
parameters, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.fully_shard.models import Experts, by_layer, net
from tests.fully_shard.twins import Twin, all_ranks, make_rows, mean_square, rows_of
from tests.fully_shard.uneven import (
    ACTIVE,
    active_ranks,
    by_active,
    by_world,
    num_steps,
    run_single,
    step_in_backward,
    steps_in_all,
    train_unevenly,
    updater,
)
from tests.ranks import run_on
from weft import fully_shard
from weft.errors import ConfigError
from weft.join import Join

pytestmark = run_on(threads=(2, 4))


def test_gradients() -> None:
    """Accumulated over all steps, on the ranks that had no data too; the mean is over the whole world."""
    twin = Twin(net())
    train_unevenly(twin, by_world, optimizer=None)
    twin.check()
    twin.update()
    twin.train(2)  # evenly again


class AllGatherByHand:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> None:
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


class ReduceScatterByHand(AllGatherByHand):
    def __call__(self, *args: Any, op: Any = None, **tensors: Any) -> None:
        dist.reduce_scatter_tensor(
            tensors["output_tensor"], tensors["input_tensor"], op=op, group=tensors["group"]
        )


def test_collectives_of_the_users() -> None:
    """What they call is fully_shard's: joined ranks make the same calls."""
    twin = Twin(net())
    twin.sharded.set_custom_all_gather(AllGatherByHand())
    twin.sharded.set_custom_reduce_scatter(ReduceScatterByHand())
    train_unevenly(twin, by_world, optimizer=None)
    twin.check()


def test_gradients_of_the_active() -> None:
    """The mean over the ranks that had data."""
    twin = Twin(net())
    train_unevenly(twin, by_active, optimizer=None, **ACTIVE)
    twin.check()


def test_an_optimizer() -> None:
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


def test_a_function() -> None:
    twin = Twin(net())
    _, update = updater(twin.sharded)
    train_unevenly(twin, by_world, update=update, update_single=updater(twin.single)[1], optimizer=update)
    twin.assert_same_parameters()


def test_an_optimizer_in_backward() -> None:
    """A rank without data makes no step of its own, but the hooks of its parameters are called."""
    twin = Twin(net())
    step_in_backward(twin.sharded)
    step_in_backward(twin.single)
    train_unevenly(twin, by_world, optimizer=None)
    twin.assert_same_parameters()


def test_the_switch_is_off() -> None:
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


def test_even_inputs() -> None:
    twin = Twin(net())
    rank = dist.get_rank()
    with Join([twin.sharded], optimizer=None):
        for step in range(3):
            twin.backward(make_rows(step))
    twin.check()
    assert len(set(all_ranks(rank))) == dist.get_world_size()


def test_other_experts() -> None:
    """Uneven inputs and ranks that use different modules."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows, ["a", "b", "ab", ""][rank]).square().mean()

    twin = Twin(Experts("ab"), by_layer)
    step_in_backward(twin.sharded)
    step_in_backward(twin.single)
    train_unevenly(twin, by_world, loss, optimizer=None)
    twin.assert_same_parameters()


def test_accumulation_without_sync() -> None:
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


def hybrid_mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


@run_on(threads=4, shape=[(2, 2)])
@run_on(threads=3, shape=[(1, 3), (3, 1)])
def test_hybrid(shape: tuple[int, int]) -> None:
    """Ranks of several shard groups join together, and a collective of the loop's own is stood in for."""
    for reshard in (True, False):
        twin = Twin(net(), mesh=hybrid_mesh(shape), reshard_after_forward=reshard)
        optimizer, update = updater(twin.sharded)
        rank, size = dist.get_rank(), dist.get_world_size()
        with Join([twin.sharded], optimizer=optimizer):
            for step in range(num_steps(rank)):
                mean_square(twin.sharded, rows_of(make_rows(step), rank), rank).backward()
                update()
                metric = torch.ones(1)
                dist.all_reduce(metric)
                assert metric.item() == len(active_ranks(step))
        update_single = updater(twin.single)[1]
        for step in range(steps_in_all()):
            run_single(twin.single, step, by_world)
            update_single()
        twin.assert_same_parameters()
        twin.sharded.zero_grad()
        twin.single.zero_grad()
        twin.train(1)
        assert size == shape[0] * shape[1]


@run_on(threads=4, shape=[(2, 2)])
@run_on(threads=3, shape=[(1, 3), (3, 1)])
def test_hybrid_of_the_active(shape: tuple[int, int]) -> None:
    """The mean over the ranks that had data, which are not equally many in each shard group."""
    twin = Twin(net(), mesh=hybrid_mesh(shape))
    train_unevenly(twin, by_active, optimizer=None, **ACTIVE)
    twin.check()


@run_on(threads=4, shape=[(2, 2)])
@run_on(threads=3, shape=[(1, 3), (3, 1)])
def test_hybrid_and_plain(shape: tuple[int, int]) -> None:
    """One part over two axes and the rest over one, of the same ranks."""
    mesh = hybrid_mesh(shape)

    def wrap(model: nn.Module) -> None:
        layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
        fully_shard(layers[0], mesh=mesh)
        fully_shard(model)

    twin = Twin(net(), wrap)
    train_unevenly(twin, by_world, optimizer=None)
    twin.check()


@run_on(threads=4)
def test_different_ranks() -> None:
    """Parts over meshes of different ranks have no ranks that join together."""
    model = net()
    layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
    fully_shard(layers[0], mesh=hybrid_mesh((2, 2))["shard"])
    fully_shard(model)
    with pytest.raises(ConfigError, match="meshes of the same ranks"):
        Join([model], optimizer=None)
