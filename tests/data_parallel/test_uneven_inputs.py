"""Uneven inputs: what a rank did before it joined, and forwards without a backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.data_parallel import MixedPrecision

pytestmark = run_on(threads=2)


def test_a_rank_without_inputs_may_have_evaluated_before() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    rows = torch.ones(2, 3)
    with torch.no_grad():
        model(rows)
    with model.join():
        for _ in range(2 * dist.get_rank()):
            model(rows).sum().backward()


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
def test_active_ranks_may_evaluate_between_steps(module: nn.Module) -> None:
    model = DistributedDataParallel(copy.deepcopy(module))
    rows = torch.ones(2, 3)
    with model.join():
        for _ in range(2 + 2 * dist.get_rank()):
            model(rows).sum().backward()
            with torch.no_grad():
                model(rows)


def test_mixed_precision_divides_by_the_ranks_that_are_left() -> None:
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    seen: list[float] = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + dist.get_rank()):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            seen.append(net.weight.grad.item())
    assert seen == [1.0] * (1 + dist.get_rank())
