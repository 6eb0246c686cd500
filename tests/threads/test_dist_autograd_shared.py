"""Leaves that get one and the same gradient from another worker: each has its own."""

from __future__ import annotations

import torch
import torch.distributed as dist

import weft
from weft import dist_autograd, rpc

_leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]


def leaf(place: int) -> torch.Tensor:
    return _leaves[place]


def sums(context_id: int) -> list[float]:
    gradients = dist_autograd.get_gradients(context_id)
    return [gradients[leaf].sum().item() for leaf in _leaves]


def job() -> list[float]:
    rpc.init_rpc(f"worker{dist.get_rank()}")
    seen: list[float] = []
    if dist.get_rank() == 0:
        with dist_autograd.context() as context_id:
            both = rpc.rpc_sync("worker1", leaf, (0,)) + rpc.rpc_sync("worker1", leaf, (1,))
            loss = (both * torch.ones(2, 2)).sum()
            for retain_graph in (True, False):
                dist_autograd.backward(context_id, [loss], retain_graph=retain_graph)
            seen = rpc.rpc_sync("worker1", sums, (context_id,))
    rpc.shutdown()
    return seen


def test_passes_add_up_for_each_leaf() -> None:
    assert weft.launch(job, ranks=2, kind="thread")[0] == [8.0, 8.0]
