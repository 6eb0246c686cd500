"""How long is a compiled training step on a GPU under weft's replicate, against the bare module's?

One rank on nccl, since nccl refuses a second one on the same GPU: what is measured is what data parallel
costs a compiled step beside the communication. The models and the step are those of data_parallel_gpu.py.
Gradients are checked against the bare module's before anything is timed.

`bare` is the compiled module itself; `weft` is the compiled replicated one, which has nothing to do for a
single rank; `weft hook` has a hook that all-reduces each bucket over nccl from within the graph.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from data_parallel_gpu import (
    Model,
    check_gradients,
    make_gpt,
    make_step,
    make_tiny,
    on_one_rank,
    reduce_over_nccl,
)
from harness import Candidate, CaseResult, Schedule, announce, measure
from question import ask
from report import Goal

import weft

LIMIT = 1.02
MODELS = [
    Model("GPT 839 M, bf16", make_gpt, "bare", LIMIT, 3, 0.05, None),
    Model("580 small tensors", make_tiny, "bare", LIMIT, 10, 1e-4, None),
]


def plan_goals(models: list[Model]) -> list[Goal]:
    """What is asked of all cases."""
    goals: list[Goal] = []
    for model in models:
        goals.append(Goal(model.name, "weft", "bare", model.limit))
        goals.append(Goal(model.name, "weft hook", "bare", None))
    return goals


def measure_cases(models: list[Model], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the models, one after the other."""
    torch.cuda.set_device(0)
    results: list[CaseResult] = []
    for model in models:
        announce(model.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
        results.append(
            CaseResult("a compiled step", model.name, measure(make_steps(model, is_quick), schedule))
        )
    return results


def make_steps(model: Model, is_quick: bool) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, batch = model.make(is_quick)
    hooked: Any = weft.replicate(copy.deepcopy(bare))
    hooked.register_comm_hook(None, reduce_over_nccl)
    modules: dict[str, Any] = {"bare": bare, "weft": weft.replicate(copy.deepcopy(bare)), "weft hook": hooked}
    compiled: dict[str, Any] = {name: torch.compile(module) for name, module in modules.items()}
    steps = {name: make_step(module, batch) for name, module in compiled.items()}
    for name, module in modules.items():
        steps[name]()
        steps[name]()
        check_gradients(name, module, modules["bare"], model.tolerance)
    return steps


def main() -> None:
    question = ask("compiled_gpu", __doc__, needs_gpu=True)
    models = question.choose(MODELS)
    results = on_one_rank(measure_cases, models, question.rounds, question.is_quick)
    question.answer(results, plan_goals(models))


if __name__ == "__main__":
    sys.exit(main())
