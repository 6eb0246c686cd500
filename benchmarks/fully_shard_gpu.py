"""How long is a training step on a GPU under weft's fully_shard, and how much memory does it take?

One rank on nccl, since nccl refuses a second one on the same GPU: what is measured is what sharding costs
beside the communication. A step clears the gradients and runs forward and backward; a call is timed by the
host's clock up to the end of the GPU's work. The GPT is sharded by block with its tied embedding in the
root, the small tensors in the root alone. Every candidate's gradients are checked against the bare module's
before it is timed.

`bare` is the module itself; `torch` is torch's fully_shard and `weft` is weft's, both of which gather again
for backward; with `keep` they don't.

Then four ranks share the GPU over the local group: a GPT in float32 is trained with Adam, sharded by weft,
and its losses are held against those of a single process with the whole batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_gpu import GPT, MB, make_gpt, make_step, make_tiny, on_one_rank
from harness import Candidate, CaseResult, Counted, Result, Schedule, announce, measure
from question import ask
from report import Goal, Kind
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import weft

NUM_TRAINERS = 4
NUM_TRAIN_STEPS = 12
LOSS_LIMIT = 1e-4  # how far a loss may be off, over the loss


@dataclass(frozen=True)
class Model:
    """A case: a model, the parts that are sharded before the whole, and what is asked of weft over bare."""

    name: str
    make: Callable[[bool], tuple[nn.Module, torch.Tensor]]
    list_parts: Callable[[Any], list[nn.Module]]
    limit: float | None
    num_calls: int
    tolerance: float  # of gradients, over the largest of their tensor


def make_gpt_with(num_rows: int) -> Callable[[bool], tuple[nn.Module, torch.Tensor]]:
    """The GPT with a batch of so many rows of 1024 tokens. With one, the GPU waits for the host."""

    def make(is_quick: bool) -> tuple[nn.Module, torch.Tensor]:
        model, batch = make_gpt(is_quick)
        return model, batch[:num_rows]

    return make


def list_blocks(gpt: Any) -> list[nn.Module]:
    return list(gpt.blocks)


MODELS = [
    Model("GPT 839 M, 8 rows", make_gpt_with(8), list_blocks, 1.08, 3, 0.05),
    Model("GPT 839 M, 4 rows", make_gpt_with(4), list_blocks, 1.08, 3, 0.05),
    Model("GPT 839 M, 1 row", make_gpt_with(1), list_blocks, None, 3, 0.05),
    Model("580 small tensors", make_tiny, lambda tiny: [], 1.25, 10, 1e-4),
]
PEAKS = f"{MODELS[0].name}, memory"
TRAINING = f"training, {NUM_TRAINERS} ranks"


@dataclass(frozen=True)
class Way:
    """Who shards, and whether the whole parameters stay after forward."""

    fully_shard: Any
    keeps: bool = False


WAYS = {
    "bare": None,
    "torch": Way(torch_fully_shard),
    "torch keep": Way(torch_fully_shard, keeps=True),
    "weft": Way(weft.fully_shard),
    "weft keep": Way(weft.fully_shard, keeps=True),
}


def plan_goals() -> list[Goal]:
    """What is asked of all cases."""
    goals: list[Goal] = []
    for model in MODELS:
        goals.append(Goal(model.name, "weft", "bare", model.limit))
        goals += [Goal(model.name, name, "bare", None) for name in ("weft keep", "torch", "torch keep")]
        goals.append(Goal(model.name, "weft", "torch", None))
    goals.append(Goal(PEAKS, "weft", "torch", 1.0))
    goals.append(Goal(PEAKS, "weft keep", "torch keep", 1.0))
    goals.append(Goal(f"{TRAINING}, losses", "weft / alone - 1", None, LOSS_LIMIT, Kind.NUMBER))
    return goals


# -- a single rank -----------------------------------------------------------------


def measure_models(only: str, num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the models with `only` in their name, one after the other."""
    torch.cuda.set_device(0)
    results: list[CaseResult] = []
    for model in MODELS:
        if only in model.name:
            announce(model.name)
            schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
            results.append(CaseResult("a step", model.name, measure(make_steps(model, is_quick), schedule)))
    return results


def make_steps(model: Model, is_quick: bool) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, batch = model.make(is_quick)
    modules = {name: shard(copy.deepcopy(bare), model, way) for name, way in WAYS.items()}
    steps = {name: make_step(module, batch) for name, module in modules.items()}
    for name, module in modules.items():
        steps[name]()
        steps[name]()  # the second may follow the order that the first has shown
        check_gradients(name, module, modules["bare"], model.tolerance)
    return steps


def shard(module: nn.Module, model: Model, way: Way | None) -> nn.Module:
    if way is not None:
        for part in [*model.list_parts(module), module]:
            way.fully_shard(part, reshard_after_forward=not way.keeps)
    return module


def check_gradients(name: str, module: nn.Module, bare: nn.Module, tolerance: float) -> None:
    for seen, right in zip(module.parameters(), bare.parameters(), strict=True):
        assert right.grad is not None
        if isinstance(seen.grad, DTensor) == (name == "bare"):
            raise RuntimeError(f"candidate '{name}': a gradient is a {type(seen.grad).__name__}.")
        grad = seen.grad.full_tensor() if isinstance(seen.grad, DTensor) else seen.grad
        assert grad is not None
        apart = (grad - right.grad).abs().max().item()
        if not apart <= tolerance * right.grad.abs().max().item():
            raise RuntimeError(f"candidate '{name}': a gradient is {apart:.3g} from the bare module's.")


def measure_peak(name: str, is_quick: bool) -> float:
    """The most memory that a step of the large model takes, parameters included, in MB."""
    torch.cuda.set_device(0)
    model = MODELS[0]
    module, batch = model.make(is_quick)
    step = make_step(shard(module, model, WAYS[name]), batch)
    step()
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / MB


# -- several ranks on the GPU ------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What a rank saw: the mean loss of each step, and the most memory."""

    losses: list[float]
    peak_mb: float


def train(is_quick: bool) -> Training:
    """Train on this rank's part of a batch that is the same for any number of ranks."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(500, 256, 2) if is_quick else GPT(8000, 768, 12)
    if dist.get_world_size() > 1:
        for part in [*model.blocks, model]:
            weft.fully_shard(part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses: list[float] = []
    for step in range(3 if is_quick else NUM_TRAIN_STEPS):
        tokens = torch.randint(500, (2 * NUM_TRAINERS, 129), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()].cuda()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        logits = model(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return Training(losses, torch.cuda.max_memory_allocated() / MB)


def compare_training(is_quick: bool) -> list[Counted]:
    """Hold the losses of several ranks, over the local group, against those of one, and their memory too."""
    one = weft.launch(train, ranks=1, args=(is_quick,))[0]
    several = weft.launch(train, ranks=NUM_TRAINERS, args=(is_quick,))[0]
    off = max(abs(a - b) / b for a, b in zip(several.losses, one.losses, strict=True))
    seen = {"first": several.losses[0], "last": several.losses[-1], "last alone": one.losses[-1]}
    return [
        Counted("losses", f"{TRAINING}, losses", seen | {"weft / alone - 1": off}),
        Counted("peak, MB", f"{TRAINING}, memory", {"a rank": several.peak_mb, "alone": one.peak_mb}),
    ]


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask("fully_shard_gpu", __doc__, needs_gpu=True)
    question.check_names([*(model.name for model in MODELS), PEAKS, TRAINING])
    results: list[Result] = []
    if any(question.wants(model.name) for model in MODELS):
        results += on_one_rank(measure_models, question.options.only, question.rounds, question.is_quick)
    if question.wants(PEAKS):
        # Each in a process of its own: nothing is left over.
        peaks = {name: on_one_rank(measure_peak, name, question.is_quick) for name in WAYS}
        results.append(Counted("peak of a step, MB", PEAKS, peaks))
    if question.wants(TRAINING):
        results += compare_training(question.is_quick)
    question.answer(results, plan_goals())


if __name__ == "__main__":
    sys.exit(main())
