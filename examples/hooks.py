"""Gradient hooks by hand: one of weft's, which sends a quarter of the bytes, and one of one's own.

    python examples/hooks.py
    torchrun --nproc-per-node 2 examples/hooks.py

Printed are the bytes of gradients that a rank sends in a step, the last loss, and that of one process.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import weft
from weft.comm_hooks.default_hooks import allreduce_hook
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook as int8_hook


def bf16_hook(rounded_away: dict[int, Tensor], bucket: weft.GradBucket) -> Future[Tensor]:
    """The mean in 16 bits. What rounding takes away goes with the next step's gradients, and is not lost."""
    flat = bucket.buffer() / dist.get_world_size()
    rest = rounded_away.get(bucket.index(), torch.zeros(0))
    flat += rest if rest.shape == flat.shape else 0  # buckets are planned anew after the first step
    sent = flat.bfloat16()
    rounded_away[bucket.index()] = flat - sent
    return weft.comm.all_reduce(sent).future()


def train(model: nn.Module, part: int = 0, num_parts: int = 1) -> Tensor:
    """The loop, on a part of each batch: pairs of numbers, whose product is to be learned."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02), list[Tensor]()
    batches = torch.rand(30, 32, 2, generator=torch.Generator().manual_seed(1))
    for rows in batches.chunk(num_parts, dim=1)[part]:
        optimizer.zero_grad()
        losses.append((model(rows) - rows.prod(dim=1, keepdim=True)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def main() -> None:
    """Be a rank: train with each hook, and compare with one process."""
    world, bare = weft.init(), nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 1))
    for state, hook in [(None, allreduce_hook), (None, int8_hook), ({}, bf16_hook)]:
        model = weft.DistributedDataParallel(deepcopy(bare))  # rank 0's values count
        model.register_comm_hook(state, hook)
        with weft.record() as events:
            losses = train(model, world.rank, world.size)
        weft.comm.all_reduce(losses, dist.ReduceOp.AVG).wait()
        if world.rank == 0:
            alone, sent = train(deepcopy(bare)), events.total_bytes_in // len(losses)
            print(f"{hook.__name__}: {sent} bytes a step, loss {losses[-1]:.6f}, alone {alone[-1]:.6f}")
            torch.testing.assert_close(losses, alone, rtol=0.02, atol=1e-4)


if __name__ == "__main__":
    main() if dist.is_torchelastic_launched() else weft.launch(main, ranks=2)
