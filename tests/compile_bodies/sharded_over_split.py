"""fully_shard over tensor parallel, compiled: graphs break at sharded modules, and gradients are right."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
import weft.tensor_parallel as tp


def steps(backend: str) -> None:
    """Three steps of a model that is split and sharded, against the same one without a compiler."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Two layers in a group: the second one's piece of the group's memory doesn't begin where that begins.
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)))
    plain, compiled = (_spread(copy.deepcopy(bare), mesh) for _ in range(2))
    run = torch.compile(compiled, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, compiled)]
    for step in range(3):
        rows = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(step * 2 + mesh.get_local_rank("dp"))
        )
        losses = [model(rows).square().mean() for model in (plain, run)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            assert isinstance(one.grad, DTensor), name
            assert isinstance(other.grad, DTensor), name
            torch.testing.assert_close(other.grad.to_local(), one.grad.to_local(), msg=name)
        for optimizer in optimizers:
            optimizer.step()


def _spread(model: nn.Sequential, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    plan: dict[str, tp.ParallelStyle] = {}
    for at in range(len(model)):
        plan |= {f"{at}.0": tp.ColwiseParallel(), f"{at}.2": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh["tp"], plan)
    for block in (*model, model):
        weft.fully_shard(block, mesh=mesh["dp"])
    return model
