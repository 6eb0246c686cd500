"""A remote embedding by hand: the table lives on rank 0 and is called by RPC, the rest is data parallel.

    python examples/remote_embedding.py
    torchrun --nproc-per-node 2 examples/remote_embedding.py

One backward goes through both. The losses are those of one process with the whole batches: both are printed.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft import dist_autograd, rpc

BATCHES = torch.randint(50, (10, 32), generator=torch.Generator().manual_seed(1))  # of words, by number


def train(table: weft.RemoteModule, head: nn.Module, lr: float = 0.1) -> Tensor:
    """Learn which words are odd, with the other ranks. Each steps the table by its part of the mean."""
    world, head, losses = weft.init(), weft.DistributedDataParallel(head), list[Tensor]()
    table_sgd = weft.DistributedOptimizer(torch.optim.SGD, table.remote_parameters(), lr=lr / world.size)
    head_sgd = weft.DistributedOptimizer(torch.optim.SGD, list(map(rpc.RRef, head.parameters())), lr=lr)
    for words in BATCHES.chunk(world.size, dim=1)[world.rank]:
        with dist_autograd.context() as context_id:
            loss = (head(table(words)).squeeze(1) - words % 2).square().mean()
            dist_autograd.backward(context_id, [loss])
            weft.comm.barrier().wait()  # every rank has read the table as it was,
            table_sgd.step(context_id)
            head_sgd.step(context_id)
            weft.comm.barrier().wait()  # and reads it next with everyone's step in it
        losses.append(loss.detach())
    return weft.comm.all_reduce(torch.stack(losses), dist.ReduceOp.AVG).wait()


def main() -> None:
    """Be rank 0, which has the table and gives out the work, or one that gets it in shutdown."""
    world = weft.init()
    rpc.init_rpc(f"worker{world.rank}")
    if world.rank == 0:
        table, head = weft.RemoteModule("worker0", nn.Embedding, (50, 16)), nn.Linear(16, 1)
        alone = nn.Sequential(nn.Embedding(50, 16), copy.deepcopy(head))
        alone[0].load_state_dict(table.state_dict())
        sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
        calls = [rpc.rpc_async(rank, train, (table, head), timeout=0) for rank in range(world.size)]
        for step, (seen, words) in enumerate(zip(torch.futures.wait_all(calls)[0], BATCHES, strict=True)):
            sgd.zero_grad()
            loss = (alone(words).squeeze(1) - words % 2).square().mean()
            loss.backward()
            sgd.step()
            print(f"step {step}  loss on {world.size} ranks {seen:.6f}  alone {loss:.6f}")
            torch.testing.assert_close(seen, loss.detach())
    rpc.shutdown()


if __name__ == "__main__":
    main() if dist.is_torchelastic_launched() else weft.launch(main, ranks=2)
