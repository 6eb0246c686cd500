"""Autocast and GradScaler under DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel_bodies.libraries import DistributedDataParallel
from tests.data_parallel_bodies.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradients,
    filled,
    make_rows,
    rows_of,
    single_loss,
)
from weft.testing import on_ranks

# Both compute the same 16-bit numbers, row by row; sums over ranks are float32's.
SUMS = 1e-6


def half_loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(rows.float())
        assert output.dtype == torch.bfloat16
    return output.float().square().mean()


def single_net() -> nn.Module:
    return filled(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), dtype=torch.float32
    )


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_autocast(view: bool) -> None:
    # The weights are cast once a forward and the casts' gradients added in 16 bits, so the single
    # process keeps the ranks apart: one backward each.
    twin = Twin(single_net(), gradient_as_bucket_view=view)
    world_size = dist.get_world_size()
    for step in range(3):
        rows = make_rows(step)
        half_loss(twin.parallel, rows_of(rows, dist.get_rank()), 0).backward()
        for rank in range(world_size):
            (half_loss(twin.single, rows_of(rows, rank), rank) / world_size).backward()
        assert all(param.grad.dtype == torch.float32 for param in twin.parallel.parameters())
        twin.check(SUMS)
        twin.update()


def scaled_step(model: nn.Module, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@on_ranks(2)
def test_grad_scaler() -> None:
    model = single_net()
    single, parallel = copy.deepcopy(model), DistributedDataParallel(model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        rows = make_rows(step).float()
        scaled_step(single, single_loss(single, rows), scalers[0])
        scaled_step(parallel, parallel(rows_of(rows, dist.get_rank())).square().mean(), scalers[1])
        assert_same_gradients(parallel, single, SUMS)
    for param, right in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(param, right, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    parallel = DistributedDataParallel(single_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [param.detach().clone() for param in parallel.parameters()]
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    rows = rows_of(make_rows().float(), dist.get_rank())
    scaled_step(parallel, (parallel(rows) * factor).sum(), scaler)
    assert all_ranks(scaler.get_scale()) == [512.0] * dist.get_world_size()
    for param, old in zip(parallel.parameters(), before, strict=True):
        assert torch.equal(param, old)
    scaled_step(parallel, parallel(rows).square().mean(), scaler)
    assert not torch.equal(next(parallel.parameters()), before[0])
