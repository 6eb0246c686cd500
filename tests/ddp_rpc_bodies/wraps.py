"""The ways to make a module data parallel over the trainers, each under one name."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tests.ddp_rpc_bodies.libraries import ON_TORCH, DistributedDataParallel, fully_shard, replicate
from tests.ddp_rpc_bodies.running import Trainer

Wrap = Callable[..., Any]


def ddp(trainer: Trainer, module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, process_group=trainer.group, **options)


def replicated(trainer: Trainer, module: nn.Module, **options: Any) -> Any:
    return replicate(module, process_group=trainer.group, **options)


def sharded(trainer: Trainer, module: nn.Module, by_child: bool = True, **options: Any) -> Any:
    """A group for each child that has parameters, then one for what is left."""
    for child in module.children():
        if by_child and any(True for _ in child.parameters()):
            fully_shard(child, mesh=trainer.mesh, **options)
    return fully_shard(module, mesh=trainer.mesh, **options)


# torch's fully_shard puts its gradients into `.grad`, also under distributed autograd.
WRAPS: list[Wrap] = [ddp, replicated] if ON_TORCH else [ddp, replicated, sharded]


@contextmanager
def without_sync(model: Any) -> Generator[None]:
    """Gradients of forwards in the block are not reduced."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)
