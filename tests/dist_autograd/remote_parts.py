"""Workers with a layer each, for a distributed optimizer to train."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import weft
from tests.rpc.workers import RANKS
from weft import DistributedOptimizer, dist_autograd, rpc


class Part(nn.Module):
    """A linear layer whose values follow from its seed."""

    def __init__(self, seed: int, num_features: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(num_features, num_features, generator=generator))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]

    def grads(self) -> list[Tensor | None]:
        return [param.grad for param in self.parameters()]


def make_parts() -> list[weft.RemoteModule]:
    return [weft.RemoteModule(f"worker{rank}", Part, (rank,)) for rank in range(RANKS)]


def parameters_of(parts: list[weft.RemoteModule]) -> list[rpc.RRef[nn.Parameter]]:
    return [rref for part in parts for rref in part.remote_parameters()]


def ask(part: weft.RemoteModule, method: str) -> Any:
    return getattr(part.module_rref.rpc_sync(), method)()


def batch(step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def loss_of(parts: list[Any], x: Tensor) -> Tensor:
    for part in parts:
        x = torch.tanh(part(x))
    return x.square().sum()


class Descent:
    """All that a distributed optimizer needs of an optimizer. torch's take seconds to load in a process."""

    def __init__(self, params: list[Tensor], victim: int = -1) -> None:
        self.params = params
        self.victim = victim

    @torch.no_grad()
    def step(self) -> None:
        if rpc.get_worker_info().id == self.victim:
            os._exit(1)
        for param in self.params:
            if param.grad is not None:
                param.sub_(param.grad)


def step_part_of_it() -> list[Tensor]:
    """Worker 2 has parameters, and no part in this context."""
    parts = make_parts()
    optimizer = DistributedOptimizer(Descent, parameters_of(parts))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss_of(parts[:2], batch(0))])
        # From another thread, whose calls don't carry the context anywhere.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(optimizer.step, context_id).result()
    return [ask(part, "values")[0] for part in parts]


def step_as_one_dies() -> tuple[str, tuple[int, ...], Tensor]:
    """What is told of it, and a parameter of another worker."""
    parts = make_parts()
    optimizer = DistributedOptimizer(Descent, parameters_of(parts), victim=2)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss_of(parts, batch(0))])
        try:
            optimizer.step(context_id)
        except weft.PeerError as error:
            return str(error), error.ranks, ask(parts[1], "values")[0]
    raise AssertionError("it did not fail")
