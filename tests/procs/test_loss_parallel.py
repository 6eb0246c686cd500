"""weft's loss_parallel beside torch's, over gloo and the local group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel

from weft.tensor_parallel.loss import loss_parallel
from weft.testing.pool import shared_pool


def run_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    for shape, axes in (((4, 8), mesh), ((4, 8, 6), mesh), ((5, 8), init_device_mesh("cpu", (4,)))):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        target = torch.randint(8, (shape[0], *shape[2:]), generator=generator)
        weight = torch.rand(8, generator=generator, dtype=torch.float64)
        rows = [Shard(0)] * (axes.ndim - 1)
        dist_target = distribute_tensor(target, axes, [*rows, Replicate()], src_data_rank=None)
        for reduction in ("none", "sum", "mean"):
            if reduction == "mean" and axes.ndim > 1:
                continue
            seen: list[tuple[Any, Any]] = []
            for context in (torch_loss_parallel, loss_parallel):
                logits = distribute_tensor(x, axes, [*rows, Shard(1)], src_data_rank=None).requires_grad_()
                with context():
                    loss: Any = F.cross_entropy(logits, dist_target, weight, reduction=reduction)
                    loss.sum().backward()
                seen.append((loss.detach(), logits.grad))
            for theirs, ours in zip(*seen, strict=True):
                assert (ours.placements, ours.shape) == (theirs.placements, theirs.shape)
                torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_as_torchs(backend: str) -> None:
    shared_pool(4).run(run_both, backend=backend, timeout=90, collective_timeout=30)
