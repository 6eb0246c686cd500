"""Norms of gradients over shards, and the scaler of mixed precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.fully_shard.models import WIDTH, Expert, filled, net
from tests.fully_shard.twins import Twin, full_of, make_rows, mean_square, rows_of, single_loss
from tests.ranks import run_on

pytestmark = run_on(threads=(2, 4), gpu=2)


def make_twin() -> Twin:
    """With shards of different sizes, some of them empty on four ranks."""
    return Twin(filled(nn.Sequential(Expert(), nn.Linear(WIDTH, 3), nn.Linear(3, 1))))


def test_clipped_norms() -> None:
    for norm_type in (2.0, 1.0, math.inf):
        # torch has no largest element of an empty shard.
        twin = make_twin() if norm_type < math.inf else Twin(net(width=8))
        for step in range(2):
            twin.backward(make_rows(step, width=8 if norm_type == math.inf else WIDTH))
            limit = 0.01
            seen = clip_grad_norm_(twin.sharded.parameters(), limit, norm_type=norm_type)
            right = clip_grad_norm_(twin.single.parameters(), limit, norm_type=norm_type)
            assert right > limit
            assert full_of(seen).item() == pytest.approx(right.item(), rel=1e-12)
            twin.check()
            twin.update()
            twin.assert_same_parameters()


def test_norms_below_the_limit_change_nothing() -> None:
    twin = make_twin()
    twin.backward(make_rows())
    clip_grad_norm_(twin.sharded.parameters(), 1e6)
    twin.check()


def test_clipped_values() -> None:
    twin = make_twin()
    twin.backward(make_rows())
    for model in (twin.sharded, twin.single):
        clip_grad_value_(model.parameters(), 1e-3)
    twin.check()


@run_on(threads=4)
def test_norms_on_a_hybrid_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin = Twin(net(), mesh=mesh)
    twin.backward(make_rows())
    seen = clip_grad_norm_(twin.sharded.parameters(), 0.01)
    right = clip_grad_norm_(twin.single.parameters(), 0.01)
    assert full_of(seen).item() == pytest.approx(right.item(), rel=1e-12)
    twin.check()


def test_norms_without_some_gradients() -> None:
    twin = make_twin()
    for model in (twin.sharded, twin.single):
        model[0].requires_grad_(False)
    twin.backward(make_rows())
    seen = clip_grad_norm_(twin.sharded.parameters(), 0.01)
    right = clip_grad_norm_(twin.single.parameters(), 0.01)
    assert full_of(seen).item() == pytest.approx(right.item(), rel=1e-12)


def test_scaled_losses() -> None:
    """The same as without scaling; one rank's infinity stops the step on all."""
    twin = Twin(net().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    optimizer = torch.optim.SGD(twin.sharded.parameters(), lr=0.1)
    reference = torch.optim.SGD(twin.single.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(4):
        rows = make_rows(step).float()
        loss = scaler.scale(mean_square(twin.sharded, rows_of(rows, rank), rank))
        is_bad = step == 2
        if is_bad and rank == 1:
            loss = loss * math.inf
        loss.backward()
        scaler.unscale_(optimizer)
        if not is_bad:
            single_loss(twin.single, rows).backward()
            twin.check(1e-5)
            reference.step()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
        for each in (optimizer, reference):
            each.zero_grad()
        twin.assert_same_parameters(1e-5)
