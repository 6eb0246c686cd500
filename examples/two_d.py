"""Two kinds of parallel by hand, on 2 x 2 ranks: layers split over `tp`, batches over `dp`.

    python examples/two_d.py [fully_shard]
    torchrun --nproc-per-node 4 examples/two_d.py [fully_shard]

The losses are those of one process with the whole batches: both are printed.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # one sum over tp, behind the second layer


def make_model() -> nn.Module:
    """The same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def train(model: nn.Module, part: int = 0, num_parts: int = 1) -> Tensor:
    """The loop, on a part of each batch: pairs of numbers, whose product is to be learned."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    batches = torch.rand(10, 32, 2, generator=torch.Generator().manual_seed(1))
    for rows in batches.chunk(num_parts, dim=1)[part]:
        optimizer.zero_grad()
        loss = (model(rows) - rows.prod(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main(around: str = "ddp") -> None:
    """Be a rank: first split inside, then put data parallel around it, and compare with one process."""
    world, mesh = weft.init(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(make_model(), mesh["tp"], PLAN)
    if around == "fully_shard":
        weft.fully_shard(model, mesh=mesh["dp"])
    else:
        model = weft.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    losses = train(model, mesh.get_local_rank("dp"), 2)  # ranks of one tp group have the same rows
    weft.comm.all_reduce(losses, dist.ReduceOp.AVG).wait()
    if world.rank == 0:
        alone = train(make_model())
        for step, (seen, wanted) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}  loss on 2 x 2 ranks {seen:.6f}  alone {wanted:.6f}")
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main(*sys.argv[1:]) if dist.is_torchelastic_launched() else weft.launch(main, ranks=4, args=sys.argv[1:])
