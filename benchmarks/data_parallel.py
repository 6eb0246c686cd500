"""How long is a training step under weft's data parallel, against torch's DDP and against no communication?

A step clears the gradients, runs forward and backward, and waits for the means: no optimizer, which is the
same for all. float32, one thread a rank, two ranks. Every candidate's gradients are checked against the mean
of the ranks' own before it is timed.

`alone` is the bare module; `torch` is torch's DDP on gloo with its defaults, `torch view` with
gradient_as_bucket_view=True; `weft gloo` and `weft local` are weft's on gloo and on the local group; `int8`
and `bf16` are weft on gloo with those hooks; `join` is a step of `weft local` inside weft.join.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Candidate,
    CaseResult,
    Counted,
    Schedule,
    Summary,
    announce,
    measure,
    summarise,
    time_in_turns,
)
from question import ask
from ranks import run_ranks
from report import Goal
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from weft.comm_hooks import default_hooks, quantization_hooks
from weft.testing import bytes_by_op

NUM_RANKS = 2


class GPT(nn.Module):
    """A small transformer: 13.8 million parameters."""

    def __init__(self, vocab: int = 8000, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Tiny(nn.Module):
    """600 small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(300)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4))), torch.randn(24, 2000)


def make_gpt() -> tuple[nn.Module, torch.Tensor]:
    return GPT(), torch.randint(8000, (1, 64))


def make_tiny() -> tuple[nn.Module, torch.Tensor]:
    return Tiny(), torch.randn(4, 16)


@dataclass(frozen=True)
class Model:
    """A case: a model, and what is asked of weft on the local group and on gloo, over torch on gloo."""

    name: str
    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    local_limit: float
    gloo_limit: float
    num_calls: int
    has_hooks: bool = False


MODELS = [
    Model("MLP 4x2000", make_mlp, 0.5, 0.9, 5, has_hooks=True),
    Model("GPT 13.8 M", make_gpt, 0.62, 0.92, 5),
    Model("600 tiny", make_tiny, 0.8, 1.0, 20),
]


def plan_goals(model: Model) -> list[Goal]:
    """What is asked of a case."""
    goals = [
        Goal(model.name, "weft local", "torch", model.local_limit),
        Goal(model.name, "weft gloo", "torch", model.gloo_limit),
        Goal(model.name, "weft local", "alone", None),
        Goal(f"{model.name} join", "under join", "without", 1.05),
    ]
    if model.has_hooks:
        goals.append(Goal(model.name, "int8 gloo", "weft gloo", 0.75))
        goals.append(Goal(model.name, "bf16 gloo", "weft gloo", None))
        goals.append(Goal(f"{model.name} bytes", "int8", "float32", 0.27))
        goals.append(Goal(f"{model.name} bytes", "bf16", "float32", 0.55))
    return goals


# -- on the ranks ------------------------------------------------------------------


def measure_models(models: Sequence[Model], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the models, one after the other. Every rank calls it."""
    gloo = dist.new_group(backend="gloo")
    results: list[CaseResult] = []
    for model in models:
        announce(model.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
        results.append(
            CaseResult("data parallel", model.name, measure(make_candidates(model, gloo), schedule))
        )
        results.append(CaseResult("join", f"{model.name} join", measure_join(model, schedule)))
    return results


def make_candidates(model: Model, gloo: Any) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, _ = model.make()
    torch.manual_seed(1 + dist.get_rank())
    _, batch = model.make()
    wrapped: dict[str, nn.Module] = {
        "alone": copy.deepcopy(bare),
        "torch": TorchDDP(copy.deepcopy(bare), process_group=gloo),
        "torch view": TorchDDP(copy.deepcopy(bare), process_group=gloo, gradient_as_bucket_view=True),
        "weft gloo": weft.DistributedDataParallel(copy.deepcopy(bare), process_group=gloo),
        "weft local": weft.DistributedDataParallel(copy.deepcopy(bare)),
    }
    if model.has_hooks:
        int8 = weft.DistributedDataParallel(copy.deepcopy(bare), process_group=gloo)
        int8.register_comm_hook(gloo, quantization_hooks.quantization_pertensor_hook)
        bf16 = weft.DistributedDataParallel(copy.deepcopy(bare), process_group=gloo)
        bf16.register_comm_hook(gloo, default_hooks.bf16_compress_hook)
        wrapped |= {"int8 gloo": int8, "bf16 gloo": bf16}
    wanted = mean_gradients(wrapped["alone"], batch)
    for name, module in wrapped.items():
        if name != "alone":
            check_gradients(name, module, batch, wanted)
    return {name: make_step(module, batch) for name, module in wrapped.items()}


def make_step(module: nn.Module, batch: torch.Tensor) -> Candidate:
    params = list(module.parameters())

    def step() -> None:
        for param in params:
            param.grad = None
        module(batch).square().mean().backward()

    return step


def mean_gradients(module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    make_step(module, batch)()
    found: list[torch.Tensor] = []
    for param in module.parameters():
        assert param.grad is not None
        mean = param.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        found.append(mean / dist.get_world_size())
    return found


def check_gradients(name: str, module: nn.Module, batch: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    """Raise unless three steps give the mean of the ranks' gradients. They also let buckets be rebuilt."""
    step = make_step(module, batch)
    # A hook that rounds may be off by a part of the largest gradient.
    tolerance = 0.02 if name.startswith(("int8", "bf16")) else 1e-5
    for _ in range(3):
        step()
        for (fqn, param), mean in zip(module.named_parameters(), wanted, strict=True):
            assert param.grad is not None
            off = float((param.grad - mean).abs().max())
            if off > tolerance * float(mean.abs().max()) + 1e-12:
                raise RuntimeError(f"candidate '{name}': the gradient of {fqn} is off by {off:.3g}.")


def measure_join(model: Model, schedule: Schedule) -> dict[str, Summary]:
    """Time steps of one module, blocks within weft.join in turn with blocks outside of it."""
    module, batch = model.make()
    ddp = weft.DistributedDataParallel(module)
    step = make_step(ddp, batch)
    timed: dict[str, list[float]] = {"without": [], "under join": []}
    block = Schedule(1, schedule.num_calls)
    for _ in range(schedule.num_rounds):
        for name, context in contexts(ddp):
            with context:
                timed[name] += time_in_turns({name: step}, block, align=lambda: None)[name]
    calls = torch.tensor(list(timed.values()), dtype=torch.float64)
    dist.all_reduce(calls, dist.ReduceOp.MAX)
    return {name: summarise(row) for name, row in zip(timed, calls.tolist(), strict=True)}


def contexts(ddp: weft.DistributedDataParallel) -> Iterator[tuple[str, AbstractContextManager[object]]]:
    yield "without", nullcontext()
    yield "under join", ddp.join()


def count_bytes(model: Model) -> Counted:
    """Bytes of a step with each hook, and without one."""
    module, batch = model.make()
    counted: dict[str, float] = {}
    hooks: dict[str, Any] = {
        "float32": None,
        "int8": quantization_hooks.quantization_pertensor_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    for name, hook in hooks.items():
        ddp = weft.DistributedDataParallel(copy.deepcopy(module))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        step = make_step(ddp, batch)
        step()
        with weft.record() as events:
            step()
        counted[name] = sum(bytes_by_op(events).values())
    return Counted("bytes of a step", f"{model.name} bytes", counted)


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask("data_parallel", __doc__)
    models = question.choose(MODELS)
    results = run_ranks(measure_models, NUM_RANKS, models, question.rounds, question.is_quick, mpiexec=None)
    for model in models:
        if model.has_hooks:
            results.append(run_ranks(count_bytes, NUM_RANKS, model, mpiexec=None))
    question.answer(results, [goal for model in models for goal in plan_goals(model)])


if __name__ == "__main__":
    sys.exit(main())
