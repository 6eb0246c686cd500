"""Meshes of two axes: shards over one, copies over the other; and meshes over a part of the world.

On four ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.fully_shard.models import (
    WIDTH,
    Experts,
    Language,
    as_whole,
    by_layer,
    filled,
    loss_by_rank,
    make_tokens,
    net,
    next_token_loss,
)
from tests.fully_shard.twins import (
    Twin,
    assert_is_shard,
    assert_same_gradients,
    make_rows,
    mean_square,
    rows_of,
    single_loss,
)
from tests.ranks import run_on
from weft import replicate_with_fsdp

pytestmark = run_on(threads=4)


def mesh_of(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def test_training() -> None:
    for sizes in ((2, 2), (1, 4), (4, 1)):
        for reshard in (True, False):
            twin = Twin(net(), mesh=mesh_of(*sizes), reshard_after_forward=reshard)
            twin.train()
            param = twin.sharded[0].weight
            assert param.placements == (Replicate(), Shard(0))
            assert (
                param.to_local().shape[0]
                == {1: [6] * 4, 2: [3] * 4, 4: [2, 2, 2, 0]}[sizes[1]][dist.get_rank()]
            )


def test_transformer() -> None:
    twin = Twin(Language(), as_whole, mesh=mesh_of(2, 2))
    for step in range(3):
        twin.step(make_tokens(step), next_token_loss)


def test_copies_stay_the_same() -> None:
    """To the bit, over steps: else they would drift apart."""
    twin = Twin(net(), mesh=mesh_of(2, 2))
    for step in range(5):
        twin.backward(make_rows(step))
        twin.update()
    for param in twin.sharded.parameters():
        group = param.device_mesh.get_group("replicate")
        local = param.detach().to_local().contiguous()
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local, group=group)
        assert torch.equal(parts[0], parts[1])


def test_without_sync() -> None:
    twin = Twin(net(), mesh=mesh_of(2, 2))
    for step in range(2):
        twin.sharded.set_requires_gradient_sync(False)
        twin.backward(make_rows(10 * step))
        twin.sharded.set_requires_gradient_sync(True)
        twin.backward(make_rows(10 * step + 1))
        twin.check()
        twin.update()


def test_all_reduce_later() -> None:
    """Gradients are reduced within the shards each time, between the copies at the end only."""
    for reshard in (True, False):
        twin = Twin(net(), mesh=mesh_of(2, 2), reshard_after_forward=reshard)
        for step in range(2):
            twin.sharded.set_requires_all_reduce(False)
            twin.backward(make_rows(10 * step))
            twin.backward(make_rows(10 * step + 1))
            twin.sharded.set_requires_all_reduce(True)
            twin.backward(make_rows(10 * step + 2))
            twin.check()
            twin.update()
            twin.assert_same_parameters()


def test_each_group_is_reduced_once() -> None:
    """A shard's sum that waits for the replicas goes with the last backward's own gradients."""
    twin = Twin(net(), mesh=mesh_of(2, 2))
    groups = sum(isinstance(layer, nn.Linear) for layer in twin.sharded)
    for step in range(3):
        with weft.record() as events:
            for part in range(3):
                twin.sharded.set_requires_all_reduce(part == 2)
                twin.backward(make_rows(10 * step + part))
        ops = [event.op for event in events]
        assert (ops.count("reduce_scatter_spread"), ops.count("all_reduce")) == (3 * groups, groups), step
        twin.check()
        twin.update()


def test_accumulated_with_sync() -> None:
    twin = Twin(net(), mesh=mesh_of(2, 2))
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check()


def test_each_pair_on_its_own() -> None:
    """A mesh over two of the four ranks: the mean is theirs alone."""
    mesh = mesh_of(2, 2)["shard"]
    model = net()
    single = copy.deepcopy(model)
    by_layer(model, mesh=mesh)
    ranks = dist.get_process_group_ranks(mesh.get_group())
    rank = dist.get_rank()
    for step in range(3):
        rows = make_rows(step)
        mean_square(model, rows_of(rows, rank), rank).backward()
        losses = [mean_square(single, rows_of(rows, other), other) for other in ranks]
        torch.stack(losses).mean().backward()
        for (name, param), right in zip(model.named_parameters(), single.parameters(), strict=True):
            assert param.grad is not None
            assert_is_shard(param.grad, right.grad, name)
        for each in (model, single):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


def test_other_dims() -> None:
    """Sharded along the last dim, unevenly too (WIDTH is 6; a rank of four holds 2, 2, 2, 0)."""
    for mesh in (None, mesh_of(2, 2)):
        twin = Twin(net(), mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))
        twin.train()
        assert twin.sharded[0].weight.placements[-1] == Shard(1)


def test_a_mesh_of_three_axes_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        by_layer(net(), mesh=mesh)


def test_hooks_between() -> None:
    """The hook of an all-reduce sees what is reduced, after the copies have been averaged."""
    seen: list[torch.Tensor] = []
    twin = Twin(net(), mesh=mesh_of(2, 2))
    for module in twin.sharded.modules():
        if isinstance(module, nn.Linear):
            sharded: Any = module
            sharded.set_all_reduce_hook(lambda output: seen.append(output.clone()))
    twin.train(1)
    assert len(seen) == 3
    parts = [torch.empty_like(seen[0]) for _ in range(4)]
    dist.all_gather(parts, seen[0])
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])


class Pair(nn.Module):
    """Two layers that tensor parallelism splits: the first by its outputs, the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(rows)))


def test_with_tensor_parallel() -> None:
    """Parameters that are split along another axis already; the batch is split along ours only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = filled(nn.Sequential(Pair(), Pair()))
    single = copy.deepcopy(model)
    for pair in model:
        parallelize_module(pair, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    by_layer(model, mesh=mesh["data"], reshard_after_forward=True)
    for step in range(3):
        rows = make_rows(step)
        model(rows.chunk(2)[mesh.get_local_rank("data")]).square().mean().backward()
        single(rows).square().mean().backward()
        for (name, param), right in zip(model.named_parameters(), single.parameters(), strict=True):
            assert param.to_local().numel() <= max(right.numel() // 4, 6 // 2), name
            apart = (param.grad.full_tensor() - right.grad).abs().max()
            assert apart <= 1e-12 * right.grad.abs().max(), name
        for each in (model, single):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


def test_copies_without_shards() -> None:
    """replicate_with_fsdp: every rank holds all, and ranks may part here too."""
    for names in (("ab",), ("a", "b"), ("ab", "ba"), ("", "ab")):
        model: Any = Experts("ab")
        single = copy.deepcopy(model)
        for expert in model.experts.values():
            replicate_with_fsdp(expert)
        replicate_with_fsdp(model)
        assert all(param.placements == (Replicate(),) for param in model.parameters())
        rank = dist.get_rank()
        for step in range(3):
            rows, loss = make_rows(step), loss_by_rank(*names)
            loss(model, rows_of(rows, rank), rank).backward()
            single_loss(single, rows, loss).backward()
            assert_same_gradients(model, single)
            for each in (model, single):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()


@run_on(weft=4, gloo=4, timeout=90, full=True)
def test_all_of_these_in_one_job() -> None:
    """On processes; starting a group costs more than most of them."""
    for test in (
        test_training,
        test_transformer,
        test_copies_stay_the_same,
        test_without_sync,
        test_all_reduce_later,
        test_each_group_is_reduced_once,
        test_accumulated_with_sync,
        test_each_pair_on_its_own,
        test_other_dims,
        test_a_mesh_of_three_axes_is_refused,
        test_hooks_between,
        test_with_tensor_parallel,
        test_copies_without_shards,
    ):
        test()
