"""`trainer`: what a test is given on each trainer, a worker of RPC and a rank of one group of data parallel.

    @run_on(threads=3, gloo_threads=3, **LIMITS)
    def test_a_part_is_on_the_server(trainer: Trainer) -> None:
        part = rpc.remote(trainer.server, make_part)

The server is the last worker. It has nothing to do but to serve, until the trainers are done. Without one,
each trainer's next neighbour serves it. Below: the ways to make a trainer's module data parallel, each under
one name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tests.data_parallel_rpc.libraries import (
    ON_TORCH,
    RPC_NAME,
    DistributedDataParallel,
    fully_shard,
    replicate,
)
from tests.ranks import Place, SitOut, at_each_rank
from tests.rpc.workers import joined
from weft.testing.pool import close_shared_pools

LIMITS: dict[str, Any] = {"timeout": 90, "collective_timeout": 20}


@dataclass(frozen=True)
class Trainer:
    """Who runs a body. `group` and `mesh` are all trainers'; `half` is a group of the first or the others."""

    rank: int
    size: int
    server: str
    group: ProcessGroup
    mesh: DeviceMesh
    half: ProcessGroup

    @property
    def ranks(self) -> range:
        """The trainers."""
        return range(self.size)

    @property
    def ranks_of_half(self) -> range:
        middle = self.size // 2
        return range(middle) if self.rank < middle else range(middle, self.size)


@contextmanager
def among_trainers(has_server: bool = True) -> Generator[Trainer]:
    """Be a trainer for the length of the block, or the server, which sits the body out."""
    rank, num_trainers = dist.get_rank(), dist.get_world_size() - has_server
    ranks = list(range(num_trainers))
    middle = num_trainers // 2
    server = f"worker{num_trainers if has_server else (rank + 1) % num_trainers}"
    with joined(RPC_NAME):
        group: Any = dist.new_group(ranks)
        mesh = DeviceMesh("cpu", ranks)
        halves: list[Any] = [dist.new_group(half) for half in (ranks[:middle], ranks[middle:])]
        if rank in ranks:
            yield Trainer(rank, num_trainers, server, group, mesh, halves[rank >= middle])
        dist.barrier()
    if rank not in ranks:
        raise SitOut


@pytest.fixture
def trainer(request: pytest.FixtureRequest, collected_for: Place) -> Generator[Any]:
    """A Trainer on each rank but the server's."""
    if ON_TORCH and collected_for.kind == "thread":
        pytest.skip("torch's RPC is the process's")
    yield at_each_rank(among_trainers, **getattr(request, "param", {}))
    if ON_TORCH:
        close_shared_pools()  # torch's RPC can't be started a second time in a process


without_server = pytest.mark.parametrize("trainer", [{"has_server": False}], indirect=True, ids=["no server"])


# -- ways to be data parallel -----------------------------------------------------------------------

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

each_wrap = pytest.mark.parametrize("wrap", WRAPS)


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
