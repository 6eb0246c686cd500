"""A recommender: embedding tables on a worker of their own, dense layers replicated on the trainers.

    python examples/recommender.py

Tables are often too large for a trainer, and a step needs few of their rows. So the tables stay on one
worker, and trainers call them. The dense layers are small, and every trainer has a replica of them. One
backward goes through both: gradients of rows stay, sparse, with the tables, and those of the dense layers are
averaged over the trainers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import wait_all

import weft
from weft import dist_autograd, rpc

NUM_ITEMS, NUM_GENRES, WIDTH, BATCH = 100, 5, 16, 64


class Tables(nn.Module):
    """The rows of the items that a user liked, as their mean, and of the item that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.liked = nn.EmbeddingBag(NUM_ITEMS, WIDTH, mode="mean", sparse=True)
        self.shown = nn.Embedding(NUM_ITEMS, WIDTH, sparse=True)

    def forward(self, liked: Tensor, shown: Tensor) -> Tensor:
        return torch.cat([self.liked(liked), self.shown(shown)], dim=1)


def make_dense() -> nn.Module:
    """Layers from the rows to the logit of a click."""
    return nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Users like items of one genre, and click on those. Nobody tells the model what genres there are."""
    genre = torch.randint(NUM_GENRES, (BATCH,), generator=generator)
    shelf = torch.randint(NUM_ITEMS // NUM_GENRES, (BATCH, 5), generator=generator)
    is_click = torch.randint(2, (BATCH,), generator=generator)
    other = genre + torch.randint(1, NUM_GENRES, (BATCH,), generator=generator)
    liked = NUM_GENRES * shelf[:, :4] + genre[:, None]
    shown = NUM_GENRES * shelf[:, 4] + torch.where(is_click == 1, genre, other % NUM_GENRES)
    return liked, shown, is_click.float()


def train(tables_rref: rpc.RRef[nn.Module], num_steps: int) -> list[float]:
    """Train on this trainer, together with the others, and give the losses."""
    trainers = dist.new_group(list(range(1, dist.get_world_size())), use_local_synchronization=True)
    assert isinstance(trainers, dist.ProcessGroup)  # it is one on its members
    tables = weft.RemoteModule.init_from_module_rref("tables", tables_rref)
    dense = weft.DistributedDataParallel(make_dense(), process_group=trainers)  # all start with the first's
    dense_rrefs = [rpc.RRef(param) for param in dense.parameters()]
    optimizers = [
        weft.DistributedOptimizer(torch.optim.SparseAdam, tables.remote_parameters(), lr=0.03),
        weft.DistributedOptimizer(torch.optim.Adam, dense_rrefs, lr=0.03),
    ]
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), list[float]()
    for step in range(num_steps):
        liked, shown, is_click = make_batch(generator)
        with dist_autograd.context() as context_id:
            logits = dense(tables(liked, shown))
            loss = F.binary_cross_entropy_with_logits(logits, is_click)
            dist_autograd.backward(context_id, [loss])
            for optimizer in optimizers:
                optimizer.step(context_id)
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"trainer{dist.get_rank()}  step {step + 1:3}  loss {loss.item():.5f}", flush=True)
    return losses


def job(num_steps: int) -> list[list[float]]:
    """Be rank 0, which has the tables and gives out the work, or a trainer, which gets it in shutdown."""
    world, losses = weft.init(), []
    rpc.init_rpc(f"trainer{world.rank}" if world.rank else "tables")
    torch.manual_seed(0)  # the same start in every run
    if world.rank == 0:
        tables_rref = rpc.RRef(Tables())
        to_trainers = [
            rpc.rpc_async(to, train, (tables_rref, num_steps), timeout=0) for to in range(1, world.size)
        ]
        losses = wait_all(to_trainers)
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    weft.launch(job, ranks=3, args=(120,))
