"""How long is a compiled step under weft's replicate, against torch's compiled DDP and weft uncompiled?

The models, the step and the check of gradients are those of data_parallel.py: float32, one thread a rank, two
ranks. Everything that is compiled goes through Inductor.

`torch` is torch's DDP compiled with its defaults (the graph is split at buckets), `torch view` the same with
gradient_as_bucket_view=True, `torch view 12` that with buckets of 12 MB in place of 25. `eager gloo` and
`eager local` are weft's replicate as it is, `weft gloo` and `weft local` the same compiled, `weft gloo 12`
with buckets of 12 MB. Each is held against torch's fastest; on gloo the faster of weft's two is. `alone` is
the compiled module.

Compile times are those of a first step, forward and backward, without caches, in turns with the bare module,
until both ranks have ended it.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import Model, check_gradients, make_gpt, make_mlp, make_step, mean_gradients
from harness import Candidate, CaseResult, Schedule, Summary, announce, measure, summarise
from question import ask
from ranks import run_ranks
from report import Goal
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft

NUM_RANKS = 2
COMPILE_LIMIT = 1.15
SMALL_BUCKETS = {"bucket_cap_mb": 12}  # less is left to be sent when the backward ends
TORCHS = ("torch", "torch view", "torch view 12")
WEFTS = ("weft gloo", "weft gloo 12")

MODELS = [
    Model("MLP 4x2000", make_mlp, 0.6, 0.9, 5),
    Model("GPT 13.8 M", make_gpt, 0.6, 0.9, 5),
]
NUM_COMPILED = {"MLP 4x2000": 11, "GPT 13.8 M": 3}  # times: one takes a second, the other half a minute


def plan_goals(model: Model, best: str, weft_gloo: str) -> list[Goal]:
    """What is asked of a case: weft's fastest on gloo against torch's, and so on."""
    return [
        Goal(model.name, weft_gloo, best, model.gloo_limit),
        Goal(model.name, "weft local", best, model.local_limit),
        Goal(model.name, weft_gloo, "eager gloo", 1.0),
        Goal(model.name, "weft local", "eager local", 1.0),
        Goal(model.name, "weft local", "alone", None),
        Goal(f"{model.name}, compiling", "weft", "alone", COMPILE_LIMIT),
    ]


# -- on the ranks ------------------------------------------------------------------


def measure_models(models: Sequence[Model], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the models, one after the other. Every rank calls it."""
    gloo = dist.new_group(backend="gloo")
    results: list[CaseResult] = []
    for model in models:
        announce(model.name)
        schedule = Schedule(1, 2) if is_quick else Schedule(num_rounds, model.num_calls)
        results.append(CaseResult("compiled", model.name, measure(make_candidates(model, gloo), schedule)))
    return results


def make_candidates(model: Model, gloo: Any) -> dict[str, Candidate]:
    torch.manual_seed(0)
    bare, _ = model.make()
    torch.manual_seed(1 + dist.get_rank())
    _, batch = model.make()

    def replicated(group: Any, **options: Any) -> nn.Module:
        return weft.replicate(copy.deepcopy(bare), process_group=group, **options)

    def torchs(**options: Any) -> nn.Module:
        return TorchDDP(copy.deepcopy(bare), process_group=gloo, **options)

    modules: dict[str, Any] = {
        "alone": torch.compile(copy.deepcopy(bare)),
        "torch": torch.compile(torchs()),
        "torch view": torch.compile(torchs(gradient_as_bucket_view=True)),
        "torch view 12": torch.compile(torchs(gradient_as_bucket_view=True, **SMALL_BUCKETS)),
        "eager gloo": replicated(gloo),
        "eager local": replicated(None),
        "weft gloo": torch.compile(replicated(gloo)),
        "weft gloo 12": torch.compile(replicated(gloo, **SMALL_BUCKETS)),
        "weft local": torch.compile(replicated(None)),
    }
    wanted = mean_gradients(copy.deepcopy(bare), batch)
    for name, module in modules.items():
        if name == "alone":
            make_step(module, batch)()
        else:
            check_gradients(name, module, batch, wanted)
    return {name: make_step(module, batch) for name, module in modules.items()}


# -- compile times -----------------------------------------------------------------


def time_compiling(models: Sequence[Model], is_quick: bool) -> list[CaseResult]:
    """First steps of the compiled replicated module, and of the compiled bare one."""
    results: list[CaseResult] = []
    for model in models:
        announce(f"compile time, {model.name}")
        times: dict[str, list[float]] = {"alone": [], "weft": []}
        for _ in range(1 if is_quick else NUM_COMPILED[model.name]):
            for name, found in times.items():
                torch.compiler.reset()
                module, batch = model.make()
                if name == "weft":
                    module = weft.replicate(module)
                for _ in range(2):  # ties between ranks are not compiling, nor are their buckets
                    make_step(module, batch)()
                compiled: Any = torch.compile(module)
                step = make_step(compiled, batch)
                dist.barrier()
                begin = time.perf_counter()
                step()
                dist.barrier()  # a replicated step waits for the slowest rank; so must a bare one
                found.append(time.perf_counter() - begin)
        summaries: dict[str, Summary] = {name: summarise(found) for name, found in times.items()}
        results.append(CaseResult("compiling", f"{model.name}, compiling", summaries))
    return results


# -- the command -------------------------------------------------------------------


def best_of(names: Sequence[str], result: CaseResult) -> str:
    """The fastest of some settings."""
    return min(names, key=lambda name: result.summaries[name].median_secs)


def main() -> None:
    question = ask("compiled", __doc__)
    models = question.choose(MODELS)
    results = run_ranks(measure_models, NUM_RANKS, models, question.rounds, question.is_quick, mpiexec=None)
    goals = [
        goal
        for model, result in zip(models, results, strict=True)
        for goal in plan_goals(model, best_of(TORCHS, result), best_of(WEFTS, result))
    ]
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    results += run_ranks(time_compiling, NUM_RANKS, models, question.is_quick, mpiexec=None)
    question.answer(results, goals)


if __name__ == "__main__":
    sys.exit(main())
