"""Sparse gradients on CUDA under hooks that can't compress them: they travel in order, as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.comm_hooks import default_hooks, quantization_hooks
from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from weft.testing import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch 2.11 gives it once a process, asked to check or not.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))


@pytest.mark.parametrize("hook", ["allreduce", "int8", "powersgd"])
@on_ranks(2)
def test_sparse_gradients_pass_through(hook: str) -> None:
    torch.cuda.set_device(0)
    model = weft.DistributedDataParallel(Table().cuda(), bucket_cap_mb=0.0001)
    hooks: dict[str, tuple[Any, Any]] = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "int8": (None, quantization_hooks.quantization_perchannel_hook),
        "powersgd": (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook),
    }
    model.register_comm_hook(*hooks[hook])
    single = Table().cuda()
    single.load_state_dict(model.module.state_dict())
    for _ in range(4):
        model.zero_grad()
        single.zero_grad()
        model(torch.tensor([dist.get_rank(), 3]).cuda()).sum().backward()
        for rank in range(2):
            (single(torch.tensor([rank, 3]).cuda()).sum() / 2).backward()
        found, right = model.module.rows.weight.grad, single.rows.weight.grad
        assert found is not None
        assert right is not None
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), right.to_dense())
