"""How fast is weft's all-reduce between ranks that share one GPU?

Two processes, one GPU, float32. A call is timed by the host's clock, from before it to
the end of the GPU's work. gloo is the yardstick, since NCCL refuses two ranks on one GPU;
`copy` is one copy of the tensor on the GPU by each rank, for scale.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from harness import Candidate, CaseResult, Schedule, announce, measure
from question import ask
from ranks import run_ranks
from report import Goal, Kind

MB = 2**20
NUM_RANKS = 2
LIMITS_SECS = {256: 1.2e-3, 1: 0.2e-3}  # by size in MB


def name_of(size_mb: int) -> str:
    return f"all-reduce {size_mb} MB on one GPU, {NUM_RANKS} ranks"


def plan_goals(size_mb: int) -> list[Goal]:
    """What is asked of a size, and how that compares with gloo."""
    case, limit_secs = name_of(size_mb), LIMITS_SECS[size_mb]
    candidates = ("weft", "allocated")
    return [
        *(Goal(case, candidate, None, limit_secs, Kind.TIME) for candidate in candidates),
        *(Goal(case, candidate, "gloo", None) for candidate in candidates),
    ]


def measure_sizes(sizes_mb: list[int], num_rounds: int, is_quick: bool) -> list[CaseResult]:
    """Measure the sizes, one after the other. Every rank calls it."""
    torch.cuda.set_device(0)
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    results: list[CaseResult] = []
    for size_mb in sizes_mb:
        announce(name_of(size_mb))
        schedule = Schedule(1, 3) if is_quick else Schedule(num_rounds, 5 if size_mb > 16 else 50)
        candidates = make_candidates(size_mb * MB // 4, gloo)
        results.append(CaseResult("one GPU", name_of(size_mb), measure(candidates, schedule)))
    return results


def make_candidates(numel: int, gloo: dist.ProcessGroup) -> dict[str, Candidate]:
    """The checked candidates for a tensor of this size, ready to be timed on zeros."""
    world: Any = dist.group.WORLD
    plain = torch.zeros(numel, device="cuda")
    allocated = world.allocate(numel, dtype=torch.float32, device="cuda")
    copy = torch.empty_like(plain)
    buffers = {"gloo": (plain, gloo), "weft": (plain, world), "allocated": (allocated, world)}
    candidates = {name: all_reduce_call(tensor, group) for name, (tensor, group) in buffers.items()}
    for name, call in candidates.items():
        check_result(name, call, buffers[name][0])
    return candidates | {"copy": synchronized(lambda: copy.copy_(plain))}


def all_reduce_call(tensor: torch.Tensor, group: dist.ProcessGroup) -> Candidate:
    return synchronized(lambda: dist.all_reduce(tensor, group=group))


def synchronized(call: Candidate) -> Candidate:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def check_result(name: str, call: Candidate, tensor: torch.Tensor) -> None:
    """Raise unless the call adds up the ranks' tensors, then set this rank's to zero."""
    tensor.fill_(dist.get_rank() + 1)
    call()
    total = NUM_RANKS * (NUM_RANKS + 1) // 2
    if not bool((tensor == total).all()):
        raise RuntimeError(
            f"rank {dist.get_rank()}: all-reduce of candidate '{name}' gave {tensor}; all must be {total}."
        )
    tensor.zero_()
    torch.cuda.synchronize()


def main() -> None:
    question = ask("collectives_gpu", __doc__, needs_gpu=True)
    question.check_names([name_of(size_mb) for size_mb in LIMITS_SECS])
    sizes_mb = [size_mb for size_mb in LIMITS_SECS if question.wants(name_of(size_mb))]
    results = run_ranks(measure_sizes, NUM_RANKS, sizes_mb, question.rounds, question.is_quick, mpiexec=None)
    question.answer(results, [goal for size_mb in sizes_mb for goal in plan_goals(size_mb)])


if __name__ == "__main__":
    sys.exit(main())
