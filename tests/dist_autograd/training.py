"""Whole training loops over three workers, for both libraries: what their gradients and parameters were.

Each loop runs on worker0 and gives a trace, a dict of tensors by name; the other workers serve.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist_autograd.leaves import OPTIMIZERS, autograd
from tests.rpc.remote_functions import keep, kept
from tests.rpc.workers import RANKS, Worker, joined

Trace = dict[str, Tensor]
WIDTH, NUM_ROWS, NUM_STEPS = 6, 5, 3


class Part(nn.Module):
    """A module that lives on one worker; what it is made of depends on its seed only."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            makers: dict[str, Callable[[], nn.Module]] = {
                "stage": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
                "table": lambda: nn.EmbeddingBag(10, WIDTH, sparse=True, mode="sum"),
                "cell": lambda: nn.GRUCell(WIDTH, WIDTH),
                "head": lambda: nn.Linear(WIDTH, 2),
            }
            self.module = makers[kind]().double()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def make_part(lib: str, key: str, kind: str, seed: int) -> list[Any]:
    """Make it here, and give references to its parameters."""
    part = Part(kind, seed)
    keep(lib, key, part)
    return [import_module(lib).RRef(parameter) for parameter in part.parameters()]


def use_part(lib: str, key: str, *args: Any) -> Any:
    return kept(lib, key)(*args)


def use_and_go_on(lib: str, key: str, rest: list[tuple[str, str]], x: Tensor) -> Tensor:
    """This worker's stage, then the others' from here: a pipeline that nests."""
    y = kept(lib, key)(x)
    if not rest:
        return y
    (to, its_key), *rest = rest
    return import_module(lib).rpc_sync(to, use_and_go_on, (lib, its_key, rest, y))


def gradients_of_part(lib: str, context_id: int, key: str) -> list[Tensor]:
    gradients = autograd(lib).get_gradients(context_id)
    return [gradients[parameter].to_dense() for parameter in kept(lib, key).parameters()]


def values_of_part(lib: str, key: str) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in kept(lib, key).parameters()]


class Loop:
    """Parts on workers, an optimizer over all of them, and a trace of what they went through."""

    def __init__(self, w: Worker, parts: dict[str, tuple[str, str]], name: str, **options: Any) -> None:
        self.w, self.name, self.trace = w, name, {}
        self.parts = {key: to for key, (to, _kind) in parts.items()}
        rrefs: list[Any] = []
        for seed, (key, (to, kind)) in enumerate(parts.items()):
            rrefs += w.rpc.rpc_sync(to, make_part, (w.lib, f"{name} {key}", kind, seed))
        optimizer = import_module(OPTIMIZERS[w.lib]).DistributedOptimizer
        self.optimizer = optimizer(torch.optim.SGD, rrefs, **options)

    def use(self, key: str, *args: Any) -> Any:
        return self.w.rpc.rpc_sync(self.parts[key], use_part, (self.w.lib, f"{self.name} {key}", *args))

    def step(self, number: int, loss_of: Callable[[], Tensor]) -> None:
        w = self.w
        with autograd(w.lib).context() as context_id:
            loss = loss_of()
            autograd(w.lib).backward(context_id, [loss])
            self.trace[f"{self.name} {number} loss"] = loss.detach()
            for key, to in self.parts.items():
                args = w.lib, context_id, f"{self.name} {key}"
                for i, gradient in enumerate(w.rpc.rpc_sync(to, gradients_of_part, args)):
                    self.trace[f"{self.name} {number} gradient {i} of {key}"] = gradient
            self.optimizer.step(context_id)
        for key, to in self.parts.items():
            for i, value in enumerate(w.rpc.rpc_sync(to, values_of_part, (w.lib, f"{self.name} {key}"))):
                self.trace[f"{self.name} {number} parameter {i} of {key}"] = value


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pipeline(w: Worker) -> Trace:
    """Stages on three workers, called from each other; two batches in flight a step."""
    stages = {f"stage{i}": (f"worker{(i + 1) % 3}", "stage") for i in range(4)}
    loop = Loop(w, stages, "pipeline", lr=0.1, momentum=0.9, weight_decay=0.01)
    chain = [(to, f"pipeline {key}") for key, (to, _) in stages.items()]

    def loss_of(step: int) -> Tensor:
        futures = [
            w.rpc.rpc_async(chain[0][0], use_and_go_on, (w.lib, chain[0][1], chain[1:], rows(step + i, 5, 6)))
            for i in range(2)
        ]
        return sum(future.wait().square().sum() for future in futures)  # type: ignore[return-value]

    for step in range(NUM_STEPS):
        loop.step(step, lambda step=step: loss_of(step))
    return loop.trace


def tables(w: Worker) -> Trace:
    """Two sparse tables on one server, a head on another; the trainer puts them together."""
    parts = {"left": ("worker1", "table"), "right": ("worker1", "table"), "head": ("worker2", "head")}
    loop = Loop(w, parts, "tables", lr=0.1)

    def loss_of(step: int) -> Tensor:
        bags = torch.randint(0, 10, (NUM_ROWS, 3), generator=torch.Generator().manual_seed(step))
        both = [
            w.rpc.rpc_async("worker1", use_part, (w.lib, f"tables {key}", bags)) for key in ("left", "right")
        ]
        return loop.use("head", both[0].wait() * both[1].wait()).square().mean()

    for step in range(NUM_STEPS):
        loop.step(step, lambda step=step: loss_of(step))
    return loop.trace


def recurrent(w: Worker) -> Trace:
    """A cell on another worker that is used again and again, with its own state as argument."""
    parts = {"table": ("worker1", "table"), "cell": ("worker2", "cell"), "head": ("worker0", "head")}
    loop = Loop(w, parts, "recurrent", lr=0.5)

    def loss_of(step: int) -> Tensor:
        words = torch.randint(0, 10, (4, NUM_ROWS, 1), generator=torch.Generator().manual_seed(step))
        state, losses = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64), []
        for word in words:
            state = loop.use("cell", loop.use("table", word), state)
            losses.append(loop.use("head", state).square().sum())
        return torch.stack(losses).sum()

    for step in range(NUM_STEPS):
        loop.step(step, lambda step=step: loss_of(step))
    return loop.trace


LOOPS: list[Callable[[Worker], Trace]] = [pipeline, tables, recurrent]


def run_loops(lib: str, rank: int, stores: list[str]) -> Trace:
    """What a member of a crew does: worker0 trains, the others serve."""
    dist.init_process_group("gloo", init_method=stores[0], rank=rank, world_size=RANKS)
    trace: Trace = {}
    with joined(lib, init_method=stores[1]) as worker:
        for loop in LOOPS if rank == 0 else []:
            trace |= loop(worker)
        dist.barrier()
    dist.destroy_process_group()
    return trace
