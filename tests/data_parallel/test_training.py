"""What every training run does, in small, on process-ranks over gloo and the local group."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.hooks import mean_hook
from tests.data_parallel.libraries import ON_TORCH, replicate
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import WIDTH, Twin, all_ranks, filled, make_rows, net
from tests.ranks import run_on

pytestmark = run_on(weft=(2, 4), gloo=(2, 4), full=True)

# torch needs to be told.
FIND: dict[str, Any] = {"find_unused_parameters": True} if ON_TORCH else {}


def train(twin: Twin, steps: int = 3) -> None:
    for step in range(steps):
        twin.step(make_rows(step))


@run_on(weft=2, gloo=2)
@run_on(weft=4, gloo=4, full=True)
def test_buckets_and_views() -> None:
    for cap in (0.0001, 25):
        for view in (False, True):
            train(Twin(net(), bucket_cap_mb=cap, gradient_as_bucket_view=view))


@run_on(weft=2)
@run_on(weft=4, gloo=(2, 4), full=True)
def test_large_buckets() -> None:
    """Past what backends treat as small."""
    model = filled(nn.Sequential(nn.Linear(WIDTH, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 2)))
    train(Twin(model, bucket_cap_mb=1), steps=2)


def test_unused_by_rank_and_step() -> None:
    twin = Twin(Branches("abc"), bucket_cap_mb=0.0001, **FIND)
    for step, names in enumerate([("ab", "c"), ("a",), ("c", "b"), ("abc",)]):
        twin.step(make_rows(step), loss_by_rank(*names))


def test_accumulation() -> None:
    twin = Twin(net(), gradient_as_bucket_view=True)
    for step in range(2):
        with twin.parallel.no_sync():
            twin.backward(make_rows(10 * step))
        twin.backward(make_rows(10 * step + 1))
        twin.check()
        twin.update()


def test_buffers() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    twin = Twin(filled(model))
    train(twin)
    twin.parallel.eval()
    twin.parallel(make_rows())
    means = all_ranks(twin.parallel.module[1].running_mean)
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_static_graph() -> None:
    train(Twin(net(), static_graph=True, bucket_cap_mb=0.0001))


def test_with_a_hook() -> None:
    twin = Twin(net(), bucket_cap_mb=0.0001)
    twin.parallel.register_comm_hook(None, mean_hook)
    train(twin)


class Checkpointed(nn.Module):
    """Its middle runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (filled(nn.Linear(WIDTH, WIDTH), seed) for seed in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, torch.tanh(self.first(rows)), use_reentrant=False))


def test_checkpointed() -> None:
    train(Twin(Checkpointed()))


def test_replicated() -> None:
    train(Twin(net(), wrap=replicate, bucket_cap_mb=0.0001))


def test_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
            self.params = nn.ParameterList(nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in dtypes)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return sum(param.real.double().sum() for param in self.params) * rows.round()

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows).sum()

    twin = Twin(Mixed())
    for step in range(2):
        twin.backward(make_rows(step), loss)
        twin.check(0.0)  # whole numbers, and a world of 2 or 4
        twin.update(lr=0.0)


def test_copied() -> None:
    twin = Twin(net())
    train(twin, steps=1)
    twin.parallel = copy.deepcopy(twin.parallel)
    train(twin, steps=2)


def test_parameters_from_the_first_rank() -> None:
    model = filled(nn.Linear(WIDTH, WIDTH), seed=dist.get_rank())
    twin = Twin(model)
    weights = all_ranks(twin.parallel.module.weight.detach())
    right = filled(nn.Linear(WIDTH, WIDTH), seed=0).weight
    assert all(torch.equal(weight, right) for weight in weights)
