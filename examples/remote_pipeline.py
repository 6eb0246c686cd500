"""A pipeline: a model cut into stages on several workers, with several micro-batches on their way at once.

    python examples/remote_pipeline.py

Each stage is a RemoteModule. It gets a reference to its input and fetches that from the worker that has it,
so activations go from stage to stage, and not by way of rank 0. While one stage is at work on a micro-batch,
the stage before it has the next one.
"""

import threading

import torch
from torch import Tensor, nn

import weft
from weft import dist_autograd, rpc

WIDTH, BATCH, NUM_MICRO_BATCHES = 32, 64, 4


class Stage(nn.Module):
    """A part of the model. Calls run on several threads; the lock lets one micro-batch in at a time."""

    def __init__(self, num_in: int, num_out: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_in, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_out))
        self.lock = threading.Lock()
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            nn.init.uniform_(param, -0.3, 0.3, generator=generator)

    def forward(self, rows: rpc.RRef[Tensor]) -> Tensor:
        here = rows.to_here()
        with self.lock:
            return self.layers(here)


class Pipeline:
    """The stages, one after the other, for a whole batch."""

    def __init__(self, workers: list[str]) -> None:
        widths = [2, *[WIDTH] * (len(workers) - 1), 1]
        self.stages = [
            weft.RemoteModule(worker, Stage, (widths[index], widths[index + 1], index))
            for index, worker in enumerate(workers)
        ]

    def __call__(self, rows: Tensor) -> Tensor:
        outputs = [self.send_through(part) for part in rows.chunk(NUM_MICRO_BATCHES)]
        return torch.cat([output.to_here() for output in outputs])

    def send_through(self, rows: Tensor) -> rpc.RRef[Tensor]:
        """Start a micro-batch on its way, and don't wait for it."""
        rref: rpc.RRef[Tensor] = rpc.RRef(rows)
        for stage in self.stages:
            rref = stage.module_rref.remote().forward(rref)
        return rref

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to the parameters of all stages."""
        return [rref for stage in self.stages for rref in stage.remote_parameters()]


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two numbers, and their product."""
    rows = 2 * torch.rand(BATCH, 2, generator=generator) - 1
    return rows, rows.prod(dim=1, keepdim=True)


def train(workers: list[str], num_steps: int) -> list[float]:
    """Train on rank 0, and give the losses."""
    pipeline = Pipeline(workers)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam, pipeline.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), list[float]()
    for step in range(num_steps):
        rows, wanted = make_batch(generator)
        with dist_autograd.context() as context_id:
            loss = (pipeline(rows) - wanted).square().mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        if step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():.5f}", flush=True)
    return losses


def job(num_steps: int) -> list[float]:
    """Be rank 0, which trains, or have a stage."""
    world, losses = weft.init(), []
    rpc.init_rpc(f"worker{world.rank}")
    if world.rank == 0:
        losses = train([f"worker{rank}" for rank in range(1, world.size)], num_steps)
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    weft.launch(job, ranks=3, args=(100,))
