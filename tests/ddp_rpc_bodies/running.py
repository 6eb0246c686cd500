"""Trainers and a server: run bodies on the trainers, which are workers of RPC and one group of data parallel.

The server is the last worker. It has nothing to do but to serve, until the trainers are done. Without one,
each trainer's next neighbour serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.ddp_rpc_bodies.libraries import ON_TORCH, RPC_NAME
from tests.rpc_bodies.running import joined
from weft.launcher.pool import RankPool
from weft.testing import shared_pool

RANKS = 3
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


Body = Callable[[Trainer], object]


def run_bodies(bodies: Sequence[Body], has_server: bool) -> None:
    """Run on every rank: trainers run the bodies, one after the other, and the server waits."""
    rank, num_trainers = dist.get_rank(), dist.get_world_size() - has_server
    ranks = list(range(num_trainers))
    middle = num_trainers // 2
    server = f"worker{num_trainers if has_server else (rank + 1) % num_trainers}"
    with joined(RPC_NAME):
        group: Any = dist.new_group(ranks)
        mesh = DeviceMesh("cpu", ranks)
        halves: list[Any] = [dist.new_group(half) for half in (ranks[:middle], ranks[middle:])]
        if rank in ranks:
            trainer = Trainer(rank, num_trainers, server, group, mesh, halves[rank >= middle])
            for body in bodies:
                run_one(body, trainer)
        dist.barrier()


def run_one(body: Body, trainer: Trainer) -> None:
    try:
        body(trainer)
    except BaseException as error:
        error.add_note(f"in body {body.__name__}, trainer {trainer.rank}")  # type: ignore[attr-defined]
        raise


def on_threads(body: Body, backend: str, ranks: int = RANKS, has_server: bool = True) -> None:
    weft.launch(run_bodies, args=([body], has_server), ranks=ranks, kind="thread", backend=backend, **LIMITS)


def on_processes(bodies: Sequence[Body], backend: str, ranks: int = RANKS, has_server: bool = True) -> None:
    if not ON_TORCH:
        shared_pool(ranks).run(run_bodies, args=(bodies, has_server), backend=backend, **LIMITS)
        return
    # torch's RPC can't be started a second time in a process.
    pool = RankPool(ranks)
    try:
        pool.run(run_bodies, args=(bodies, has_server), backend=backend, **LIMITS)
    finally:
        pool.close()
