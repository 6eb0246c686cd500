"""Data parallel by hand: every rank has a copy of the model and its part of each batch.

    python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py

The losses are those of one process with the whole batches: both are printed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft

NUM_STEPS, BATCH, WIDTH = 10, 32, 64


def make_model() -> nn.Module:
    """The same values on every rank. (DDP would take rank 0's anyway.)"""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def make_batches() -> list[Tensor]:
    """Whole batches, the same on every rank: pairs of numbers, whose product is to be learned."""
    return list(torch.rand(NUM_STEPS, BATCH, 2, generator=torch.Generator().manual_seed(1)))


def train(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """The loop. It knows nothing of ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for rows in batches:
        optimizer.zero_grad()
        loss = (model(rows) - rows.prod(dim=1, keepdim=True)).square().mean()
        loss.backward()  # under DDP gradients are averaged over the ranks meanwhile
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Be a rank: train on a part of each batch, and compare with one process."""
    world = weft.init()
    model = weft.DistributedDataParallel(make_model())
    losses = train(model, [batch.chunk(world.size)[world.rank] for batch in make_batches()])
    weft.comm.all_reduce(losses, dist.ReduceOp.AVG).wait()  # each rank has the losses of its own rows
    if world.rank == 0:
        alone = train(make_model(), make_batches())
        for step, (seen, wanted) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss on {world.size} ranks {seen:.6f}  alone {wanted:.6f}")
        torch.testing.assert_close(losses, alone)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # torchrun has started the ranks
        main()
    else:
        weft.launch(main, ranks=2)
