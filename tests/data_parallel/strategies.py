"""A model that two strategies are applied to, weft's and torch's by name, and its right gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as torch_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate_with_fsdp
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from weft.fsdp import replicate_with_fsdp

WEFT: dict[str, Callable[..., Any]] = {
    "DistributedDataParallel": weft.DistributedDataParallel,
    "replicate": weft.replicate,
    "fully_shard": weft.fully_shard,
    "replicate_with_fsdp": replicate_with_fsdp,
}
TORCH: dict[str, Callable[..., Any]] = {
    "torch's DistributedDataParallel": TorchDDP,
    "torch's replicate": lambda module: torch_replicate(module),
    "torch's fully_shard": torch_fully_shard,
    "torch's replicate_with_fsdp": torch_replicate_with_fsdp,
}
ALL = {**WEFT, **TORCH}


def net() -> nn.Sequential:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Tanh(), nn.Linear(6, 4)
    ).double()
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=source, dtype=param.dtype) / 3)
    return model


def rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(rows(rank)).square().sum()


def right_gradients() -> list[torch.Tensor]:
    model, size = net(), dist.get_world_size()
    sum(loss(model, rank) for rank in range(size)).div(size).backward()  # type: ignore[union-attr]
    return [param.grad for param in model.parameters() if param.grad is not None]


def full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def assert_right(model: nn.Module) -> None:
    for _ in range(2):
        model.zero_grad()
        loss(model, dist.get_rank()).backward()
        for param, right in zip(model.parameters(), right_gradients(), strict=True):
            torch.testing.assert_close(full(param.grad), right, rtol=1e-10, atol=1e-12)
