"""How long is a training step under weft's fully_shard, and how much memory does it take, against torch's?

A step clears the gradients and runs forward and backward: no optimizer, which is the same for all. float32,
one thread a rank, two ranks. The MLP is sharded by layer, the GPT by block with its tied embedding in the
root, the 600 tiny tensors as one group, and again by lists of 30 layers. Every candidate's gradients are
checked against the mean of the ranks' own before it is timed.

`alone` is the bare module; `torch` is torch's fully_shard on gloo; `weft gloo` and `weft local` are weft's on
gloo and on the local group. Parameters are given up after forward and gathered again for backward; with
`keep` they stay.

Memory is the most that a rank holds during steps with Adam, beyond what it held before the model was made.
Each candidate gets processes of its own, whose malloc keeps no freed block of 64 KB or more.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import NUM_RANKS, make_gpt, make_mlp, make_step, make_tiny, mean_gradients
from harness import Candidate, CaseResult, Counted, Schedule, announce, measure
from question import ask
from ranks import run_ranks
from report import Goal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import weft

# Else freed blocks stay with malloc, and whoever used them first pays for all.
STRICT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}
NUM_MEMORY_STEPS = 4


@dataclass(frozen=True)
class Model:
    """A case: a model, the parts that are sharded before the whole, and what is asked of weft."""

    name: str
    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    list_parts: Callable[[Any], list[Any]]
    local_limit: float | None
    gloo_limit: float | None
    num_calls: int
    has_memory: bool = True


def by_30(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Lists of layers, each of which becomes one group."""
    return [list(layers[start : start + 30]) for start in range(0, len(layers), 30)]


MODELS = [
    Model("MLP 4x2000", make_mlp, list, 0.3, 0.75, 3),
    Model("GPT 13.8 M", make_gpt, lambda gpt: list(gpt.blocks.layers), 0.4, 0.75, 3),
    Model("600 tiny", make_tiny, lambda tiny: [], 0.3, 0.4, 5, has_memory=False),
    Model(
        "600 tiny, by 30 layers", make_tiny, lambda tiny: by_30(tiny.layers), None, None, 5, has_memory=False
    ),
]


@dataclass(frozen=True)
class Way:
    """Who shards, over which group, and whether the whole parameters stay after forward."""

    by: str
    group: str
    keeps: bool = False


WAYS = {
    "torch": Way("torch", "gloo"),
    "torch keep": Way("torch", "gloo", keeps=True),
    "weft gloo": Way("weft", "gloo"),
    "weft gloo keep": Way("weft", "gloo", keeps=True),
    "weft local": Way("weft", "local"),
    "weft local keep": Way("weft", "local", keeps=True),
}
MEMORY_CANDIDATES = ("torch", "weft gloo", "weft local", "weft DDP")


def plan_goals(model: Model) -> list[Goal]:
    """What is asked of a case."""
    return [
        Goal(model.name, "weft local", "torch", model.local_limit),
        Goal(model.name, "weft gloo", "torch", model.gloo_limit),
        Goal(model.name, "weft local keep", "torch keep", None),
        Goal(model.name, "weft gloo keep", "torch keep", None),
        Goal(model.name, "weft local", "alone", None),
        Goal(model.name, "torch", "alone", None),
        Goal(f"{model.name} memory", "weft gloo", "torch", 1.0),
        Goal(f"{model.name} memory", "weft local", "torch", 1.0),
        Goal(f"{model.name} memory", "weft local", "weft DDP", None),
    ]


# -- on the ranks: time ------------------------------------------------------------


def measure_models(models: Sequence[Model], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the models, one after the other. Every rank calls it."""
    results: list[CaseResult] = []
    for model in models:
        announce(model.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
        summaries = measure(make_candidates(model), schedule)
        results.append(CaseResult("fully shard", model.name, summaries))
    return results


def make_candidates(model: Model) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, _ = model.make()
    torch.manual_seed(1 + dist.get_rank())
    _, batch = model.make()
    wanted = mean_gradients(bare, batch)
    candidates = {"alone": make_step(bare, batch)}
    meshes = make_meshes()
    for name, way in WAYS.items():
        module = shard(copy.deepcopy(bare), model, way, meshes[way.group])
        check_gradients(name, module, batch, wanted)
        candidates[name] = make_step(module, batch)
    return candidates


def make_meshes() -> dict[str, DeviceMesh]:
    groups = {"gloo": dist.new_group(backend="gloo"), "local": dist.group.WORLD}
    return {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}


def shard(module: nn.Module, model: Model, way: Way, mesh: DeviceMesh) -> nn.Module:
    fully_shard: Any = torch_fully_shard if way.by == "torch" else weft.fully_shard
    for part in [*model.list_parts(module), module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=not way.keeps)
    return module


def check_gradients(name: str, module: nn.Module, batch: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    """Raise unless three steps give this rank's shards of the mean. They also show the modules' order."""
    step = make_step(module, batch)
    for _ in range(3):
        step()
        for (fqn, param), mean in zip(module.named_parameters(), wanted, strict=True):
            piece = mean.chunk(NUM_RANKS)[dist.get_rank()]
            if not isinstance(param.grad, DTensor) or param.grad.to_local().shape != piece.shape:
                raise RuntimeError(f"candidate '{name}': the gradient of {fqn} is not in shards.")
            off = float((param.grad.to_local() - piece).abs().max())
            if off > 1e-5 * float(mean.abs().max()) + 1e-12:
                raise RuntimeError(f"candidate '{name}': the gradient of {fqn} is off by {off:.3g}.")


# -- on the ranks: memory ----------------------------------------------------------


def measure_memory(model: Model, name: str) -> float:
    """The most memory of this rank during steps with Adam, in MB, less what it had before the model."""
    meshes = make_meshes()

    def wrap(module: nn.Module) -> nn.Module:
        if name == "weft DDP":
            return weft.DistributedDataParallel(module)
        way = WAYS[name]
        return shard(module, model, way, meshes[way.group])

    # What is loaded and set up by a first step is no part of the answer.
    train_once = make_training(nn.Linear(4, 4), torch.ones(1, 4), lambda part: part)
    train_once()
    torch.manual_seed(0)
    before_mb = read_status_mb("VmRSS")
    step = make_training(*model.make(), wrap)
    step()
    step()
    gc.collect()
    forget_peak()
    for _ in range(NUM_MEMORY_STEPS):
        step()
    peak = torch.tensor(read_status_mb("VmHWM") - before_mb)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


def make_training(
    module: nn.Module, batch: torch.Tensor, wrap: Callable[[nn.Module], nn.Module]
) -> Candidate:
    wrapped = wrap(module)
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        optimizer.step()

    return step


def read_status_mb(field: str) -> float:
    """A field of this process's memory, as the kernel counts it."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 1024


def forget_peak() -> None:
    """Let VmHWM start again from what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


# -- the command -------------------------------------------------------------------


def compare_memory(model: Model) -> Counted:
    """The peaks of all candidates, each in processes of its own."""
    os.environ.update(STRICT_MALLOC)
    peaks: dict[str, float] = {}
    for name in MEMORY_CANDIDATES:
        print(f"measuring memory of {model.name}, {name}", file=sys.stderr, flush=True)
        peaks[name] = run_ranks(measure_memory, NUM_RANKS, model, name, mpiexec=None)
    return Counted("peak of a rank, MB", f"{model.name} memory", peaks)


def main() -> None:
    question = ask("fully_shard", __doc__)
    models = question.choose(MODELS)
    results = run_ranks(measure_models, NUM_RANKS, models, question.rounds, question.is_quick, mpiexec=None)
    results += [compare_memory(model) for model in models if model.has_memory]
    question.answer(results, [goal for model in models for goal in plan_goals(model)])


if __name__ == "__main__":
    sys.exit(main())
