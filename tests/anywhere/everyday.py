"""What weft is used for, in one program of a few seconds: collectives, both wrappers, RPC.

Started by tests in restricted environments. Prints "right" at the end, or the error's first line.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import rpc
from weft.errors import WeftError

NUM_LARGE = 300_001  # more than travels inline


def check_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((NUM_LARGE,), float(rank + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == sum(range(1, size + 1))).all())
    parts = [torch.empty(NUM_LARGE) for _ in range(size)]
    dist.all_gather(parts, torch.full((NUM_LARGE,), float(rank)))
    assert [part[-1].item() for part in parts] == list(range(size))
    tensor = torch.full((NUM_LARGE,), float(rank))
    dist.broadcast(tensor, size - 1)
    assert bool((tensor == size - 1).all())


def check_wrappers() -> None:
    expected = _steps(_model())
    ddp = weft.DistributedDataParallel(_model())
    assert torch.allclose(_steps(ddp), expected, atol=1e-5)
    sharded = _model()
    weft.fully_shard(sharded)
    assert torch.allclose(_steps(sharded), expected, atol=1e-5)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def _steps(model: nn.Module) -> torch.Tensor:
    """The losses of two steps; every rank has the same batch, so that averaging changes nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.linspace(-1, 1, 8 * 128).reshape(8, 128)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_rpc() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    got = rpc.rpc_sync(f"worker{(rank + 1) % size}", torch.add, args=(torch.ones(NUM_LARGE), rank))
    assert bool((got == rank + 1).all())
    rpc.shutdown()


CHECKS = {"collectives": check_collectives, "wrappers": check_wrappers, "rpc": check_rpc}


def run_checks(names: list[str]) -> str:
    for name in names:
        CHECKS[name]()
    return str(dist.get_backend())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without", action="append", default=[], choices=[*CHECKS])
    options = parser.parse_args()
    names = [name for name in CHECKS if name not in options.without]
    try:
        backends = weft.launch(
            run_checks,
            ranks=options.ranks,
            backend=options.backend,
            args=(names,),
            timeout=100,
            collective_timeout=60,
        )
    except WeftError as error:
        cause = error.__cause__ if isinstance(error.__cause__, WeftError) else error
        print(f"{type(cause).__name__}: {str(cause).splitlines()[0]}", file=sys.stderr)
        return 1
    print("right on", backends[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
