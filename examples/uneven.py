"""Uneven inputs by hand: ranks with different numbers of batches. Nobody hangs, and nobody drops any.

    python examples/uneven.py
    torchrun --nproc-per-node 2 examples/uneven.py

A rank that has run out joins: it takes part in the others' collectives with nothing in its hands. The losses
are those of one process that gets all batches of a step at once: both are printed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.join import Join


def make_batches(rank: int) -> list[Tensor]:
    """A rank's own batches, each rank two more: pairs of numbers, whose product is to be learned."""
    return list(torch.rand(4 + 2 * rank, 16, 2, generator=torch.Generator().manual_seed(rank)))


def make_model() -> nn.Module:
    """The same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module, batches: list[Tensor], *, is_alone: bool = False) -> Tensor:
    """The loop. The loss is the mean over all rows of the step, on whatever rank they are."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for rows in batches:
        optimizer.zero_grad()
        loss = (model(rows) - rows.prod(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        total = torch.tensor([loss.item() * len(rows), len(rows)])
        if not is_alone:
            dist.all_reduce(total)  # a collective of the loop's own: ranks that have joined give zeros
        losses.append(total[0] / total[1])
    return torch.stack(losses)


def main() -> None:
    """Be a rank: train on its own batches. The last rank to run out compares with one process."""
    world, model = weft.init(), weft.DistributedDataParallel(make_model())
    with Join([model], divide_by_initial_world_size=False):  # the mean over the ranks that have inputs
        losses = train(model, make_batches(world.rank))
    if world.rank == world.size - 1:
        by_rank = [make_batches(rank) for rank in range(world.size)]
        steps = [[own[step] for own in by_rank if step < len(own)] for step in range(len(losses))]
        alone = train(make_model(), [torch.cat(batches) for batches in steps], is_alone=True)
        for step, (seen, wanted) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss on {len(steps[step])} ranks {seen:.6f}  alone {wanted:.6f}")
        torch.testing.assert_close(losses, alone)


if __name__ == "__main__":
    main() if dist.is_torchelastic_launched() else weft.launch(main, ranks=2)
