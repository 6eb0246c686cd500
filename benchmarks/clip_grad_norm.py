"""How long does it take to clip sharded gradients by their norm, against torch.nn.utils.clip_grad_norm_?

600 small float32 parameters on two ranks, one thread a rank, each a DTensor sharded on dim 0 (`1-D`), or half
of them sharded and half with whole gradients, as biases and norms are under tensor parallelism (`mixed`).
The limit is below the norm, so that every call scales. Before it is timed, every candidate's norm and
gradients are checked against torch's on the whole tensors.

`torch` is torch's function and `weft gloo` weft's, on the same DTensors over gloo; `weft local` is weft's
over the local group; `alone` is torch's on this rank's local tensors, which are no DTensors: it communicates
nothing, and its norm is this rank's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Candidate, CaseResult, Schedule, announce, measure
from question import ask
from ranks import run_ranks
from report import Goal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.optimizers.clip import clip_grad_norm_

NUM_RANKS = 2
NUM_PARAMS = 600
SHAPE = (16, 16)
MAX_NORM = 1.0
LIMIT = 0.1


@dataclass(frozen=True)
class Case:
    """Which of the parameters are sharded: each, or every other."""

    name: str
    is_mixed: bool

    def placement(self, index: int) -> Any:
        return Replicate() if self.is_mixed and index % 2 else Shard(0)


CASES = [Case(f"{NUM_PARAMS} sharded", False), Case(f"{NUM_PARAMS} mixed", True)]


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case."""
    return [
        Goal(case.name, "weft gloo", "torch", LIMIT),
        Goal(case.name, "weft local", "torch", LIMIT),
        Goal(case.name, "weft gloo", "alone", None),
        Goal(case.name, "weft local", "alone", None),
    ]


# -- on the ranks ------------------------------------------------------------------


def measure_cases(cases: Sequence[Case], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the cases, one after the other. Every rank calls it."""
    groups = {"gloo": dist.new_group(backend="gloo"), "local": dist.group.WORLD}
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    results: list[CaseResult] = []
    for case in cases:
        announce(case.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, 5)
        summaries = measure(make_candidates(case, meshes), schedule)
        results.append(CaseResult("clip_grad_norm_", case.name, summaries))
    return results


def make_candidates(case: Case, meshes: dict[str, DeviceMesh]) -> dict[str, Candidate]:
    whole = make_gradients()
    local = [distributed(case, index, grad, meshes["gloo"]).to_local() for index, grad in enumerate(whole)]
    candidates = {"alone": make_clip(nn.utils.clip_grad_norm_, local)}
    ways: dict[str, tuple[Callable[..., Any], DeviceMesh]] = {
        "torch": (nn.utils.clip_grad_norm_, meshes["gloo"]),
        "weft gloo": (clip_grad_norm_, meshes["gloo"]),
        "weft local": (clip_grad_norm_, meshes["local"]),
    }
    for name, (clip, mesh) in ways.items():
        grads = [distributed(case, index, grad, mesh) for index, grad in enumerate(whole)]
        check(name, clip, grads, whole)
        candidates[name] = make_clip(clip, grads)
    return candidates


def make_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(NUM_PARAMS)]


def distributed(case: Case, index: int, grad: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(grad.clone(), mesh, [case.placement(index)], src_data_rank=None)


def make_params(grads: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def make_clip(clip: Callable[..., Any], grads: Sequence[torch.Tensor]) -> Candidate:
    """One call. Gradients that were clipped before are scaled again: by almost 1, and as long."""
    params = make_params(grads)
    return lambda: clip(params, MAX_NORM)


def check(
    name: str, clip: Callable[..., Any], grads: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
) -> None:
    """Raise unless the norm and the gradients are those of the whole tensors."""
    seen, right = make_params(grads), make_params(whole)
    norm = clip(seen, MAX_NORM)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    right_norm = nn.utils.clip_grad_norm_(right, MAX_NORM)
    pairs = [(norm, right_norm)]
    for param, twin in zip(seen, right, strict=True):
        assert isinstance(param.grad, DTensor)
        assert twin.grad is not None
        pairs.append((param.grad.full_tensor(), twin.grad))
    off = max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)
    if off > 1e-5:
        raise RuntimeError(f"candidate '{name}': the norm or a gradient is off by {off:.3g} of its size.")


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask("clip_grad_norm", __doc__)
    cases = question.choose(CASES)
    results = run_ranks(measure_cases, NUM_RANKS, cases, question.rounds, question.is_quick, mpiexec=None)
    question.answer(results, [goal for case in cases for goal in plan_goals(case)])


if __name__ == "__main__":
    sys.exit(main())
