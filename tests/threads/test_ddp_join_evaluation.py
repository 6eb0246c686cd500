"""Uneven inputs: what a rank did before it joined, and forwards without a backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.testing import on_ranks


@on_ranks(2)
def test_a_rank_without_inputs_may_have_evaluated_before() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    rows = torch.ones(2, 3)
    with torch.no_grad():
        model(rows)
    with model.join():
        for _ in range(2 * dist.get_rank()):
            model(rows).sum().backward()


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
@on_ranks(2)
def test_active_ranks_may_evaluate_between_steps(module: nn.Module) -> None:
    model = DistributedDataParallel(copy.deepcopy(module))
    rows = torch.ones(2, 3)
    with model.join():
        for _ in range(2 + 2 * dist.get_rank()):
            model(rows).sum().backward()
            with torch.no_grad():
                model(rows)
