"""Sharded data parallel by hand: every rank has a part of each parameter, gradient and optimizer state.

    python examples/fully_shard.py
    torchrun --nproc-per-node 2 examples/fully_shard.py

The losses are those of one process with the whole batches: both are printed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft

NUM_STEPS, BATCH, WIDTH, DEPTH = 10, 32, 32, 4


def make_model() -> nn.Sequential:
    """The same values on every rank, of which each keeps its shards."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(2, WIDTH), *blocks, nn.Linear(WIDTH, 1))


def make_batches() -> list[Tensor]:
    """Whole batches, the same on every rank: pairs of numbers, whose product is to be learned."""
    return list(torch.rand(NUM_STEPS, BATCH, 2, generator=torch.Generator().manual_seed(1)))


def train(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """The loop. It knows nothing of ranks."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), list[Tensor]()
    for rows in batches:
        optimizer.zero_grad()
        loss = (model(rows) - rows.prod(dim=1, keepdim=True)).square().mean()
        loss.backward()
        weft.clip_grad_norm_(model.parameters(), max_norm=1.0)  # the norm over all shards
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Be a rank: shard the model, train on a part of each batch, and compare with one process."""
    world, model = weft.init(), make_model()
    for module in (*model, model):  # a block is whole only while it computes, with the next on its way
        weft.fully_shard(module)
    losses = train(model, [batch.chunk(world.size)[world.rank] for batch in make_batches()])
    weft.comm.all_reduce(losses, dist.ReduceOp.AVG).wait()  # each rank has the losses of its own rows
    if world.rank == 0:
        alone = train(make_model(), make_batches())
        for step, (seen, wanted) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss on {world.size} ranks {seen:.6f}  alone {wanted:.6f}")
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main() if dist.is_torchelastic_launched() else weft.launch(main, ranks=2)
