"""How fast are weft's collectives between ranks of one host, against gloo and MPICH?

float32, one thread a rank. A size is that of the full tensor: what all-reduce reduces,
what all-gather fills, what reduce-scatter reads. Every candidate's result is checked
before it is timed. Timed calls sum zeros, so that a hundred of them don't overflow.

`weft` and `gloo` are torch.distributed's own calls on ordinary tensors; `allocated` is
weft on buffers of `group.allocate`; `MPICH` is MPI by way of mpi4py, where there is
one; `memcpy` is one copy of the tensor by each rank, for scale.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Candidate, CaseResult, Schedule, announce, measure
from question import ask
from ranks import find_mpiexec, run_ranks
from report import Goal, Kind

import weft

KB, MB = 2**10, 2**20
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """A case: one collective of one size, on some ranks."""

    op: str
    num_bytes: int
    num_ranks: int = 2

    @property
    def name(self) -> str:
        size = f"{self.num_bytes // MB} MB" if self.num_bytes >= MB else f"{self.num_bytes // KB} KB"
        return f"{self.op} {size}, {self.num_ranks} ranks"


@dataclass(frozen=True)
class Door:
    """A case: what `weft.comm` costs on top of torch.distributed, for a tensor of one number."""

    backend: str
    num_ranks: int

    @property
    def name(self) -> str:
        return f"the door on {self.backend}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"


Case = Collective | Door

CASES: list[Case] = [
    *(Collective(ALL_REDUCE, size) for size in (4 * KB, 256 * KB, 4 * MB, 25 * MB, 100 * MB)),
    *(Collective(op, size) for op in (ALL_GATHER, REDUCE_SCATTER) for size in (4 * MB, 25 * MB)),
    *(Collective(ALL_REDUCE, size, num_ranks=4) for size in (4 * MB, 25 * MB)),
    Door("weft", 2),
    Door("gloo", 2),
    Door("weft", 1),
]
QUICK_BYTES = 4 * MB


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case."""
    if isinstance(case, Door):
        return [
            Goal(case.name, "weft.comm", "dist", 15e-6, Kind.EXTRA),
            Goal(case.name, "weft.comm", "dist async", None, Kind.EXTRA),
        ]
    if case.num_ranks == 4:
        limits = {"weft": (0.4, None), "allocated": (None, None)}
    elif case.op != ALL_REDUCE:
        limits = {"weft": (0.2, 0.9)}
    elif case.num_bytes == 4 * KB:
        limits = {"weft": (0.15, None)}
    elif case.num_bytes < 4 * MB:
        limits = {"weft": (0.2, 0.8)}
    else:
        limits = {"weft": (0.2, 0.8), "allocated": (0.12, 0.5)}
    return [
        Goal(case.name, candidate, against, limit)
        for candidate, pair in limits.items()
        for against, limit in zip(("gloo", "MPICH"), pair, strict=True)
    ]


# -- on the ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The groups that a rank has, all of the same ranks. `mpi` is mpi4py's MPI, or None."""

    weft: Any
    gloo: Any
    mpi: Any

    @property
    def by_name(self) -> dict[str, Any]:
        return {"gloo": self.gloo, "weft": self.weft}


@dataclass(frozen=True)
class Buffers:
    """What a collective reads and what it writes; all-reduce does both in one tensor."""

    source: torch.Tensor
    out: torch.Tensor


def measure_cases(cases: Sequence[Case], num_rounds: int, is_quick: bool, has_mpi: bool) -> list[CaseResult]:
    """Measure the cases, one after the other. Every rank calls it."""
    groups = join_groups(has_mpi)
    results: list[CaseResult] = []
    for case in cases:
        announce(case.name)
        if isinstance(case, Door):
            table, candidates, num_calls = "door", door_candidates(case, groups), 100
        else:
            table, candidates = "collectives", collective_candidates(case, groups)
            num_calls = max(5, min(100, 64 * MB // case.num_bytes))
        schedule = Schedule(1, 3) if is_quick else Schedule(num_rounds, num_calls)
        results.append(CaseResult(table, case.name, measure(candidates, schedule)))
    return results


def join_groups(has_mpi: bool) -> Groups:
    mpi = None
    if has_mpi:
        from mpi4py import MPI as mpi  # pyright: ignore[reportMissingImports] - of the extra `bench`
    return Groups(dist.group.WORLD, dist.new_group(backend="gloo"), mpi)


def collective_candidates(case: Collective, groups: Groups) -> dict[str, Candidate]:
    """The checked candidates of a case, ready to be timed on zeros."""
    plain = make_buffers(case, torch.empty)
    candidates = {name: torch_call(case.op, plain, group) for name, group in groups.by_name.items()}
    buffers = dict.fromkeys(candidates, plain)
    if case.op == ALL_REDUCE:
        buffers["allocated"] = make_buffers(case, groups.weft.allocate)
        candidates["allocated"] = torch_call(case.op, buffers["allocated"], groups.weft)
    if groups.mpi is not None:
        buffers["MPICH"] = plain
        candidates["MPICH"] = mpi_call(case.op, plain, groups.mpi)
    for name, call in candidates.items():
        check_result(name, case.op, call, buffers[name])
    if case.op == ALL_REDUCE:
        copy = plain.source.clone()
        candidates["memcpy"] = lambda: copy.copy_(plain.source)
    return candidates


def make_buffers(case: Collective, allocate: Any) -> Buffers:
    """A rank's buffers, not yet filled.

    `check_result` fills them: pages that nobody wrote to are faster to read than memory is.
    """
    full_numel = case.num_bytes // 4
    full = allocate(full_numel, dtype=torch.float32)
    if case.op == ALL_REDUCE:
        return Buffers(full, full)
    shard = allocate(full_numel // case.num_ranks, dtype=torch.float32)
    return Buffers(shard, full) if case.op == ALL_GATHER else Buffers(full, shard)


def torch_call(op: str, buffers: Buffers, group: Any) -> Candidate:
    source, out = buffers.source, buffers.out
    if op == ALL_REDUCE:
        return lambda: dist.all_reduce(out, group=group)
    # torch 2.13 renamed both, and warns about the old names.
    if op == ALL_GATHER:
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: all_gather(out, source, group=group)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce_scatter(out, source, group=group)


def mpi_call(op: str, buffers: Buffers, mpi: Any) -> Candidate:
    world = mpi.COMM_WORLD
    source, out = buffers.source.numpy(), buffers.out.numpy()
    if op == ALL_REDUCE:
        return lambda: world.Allreduce(mpi.IN_PLACE, out, mpi.SUM)
    if op == ALL_GATHER:
        return lambda: world.Allgather(source, out)
    return lambda: world.Reduce_scatter_block(source, out, mpi.SUM)


def check_result(name: str, op: str, call: Candidate, buffers: Buffers) -> None:
    """Raise unless the call does what it should, then set its buffers to zero."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    buffers.out.zero_()
    buffers.source.fill_(rank + 1)
    call()
    parts = buffers.out.view(num_ranks, -1)
    total = num_ranks * (num_ranks + 1) // 2
    for index, part in enumerate(parts):
        wanted = index + 1 if op == ALL_GATHER else total
        if not bool((part == wanted).all()):
            raise RuntimeError(f"rank {rank}: {op} of candidate '{name}' gave {part}; all must be {wanted}.")
    buffers.out.zero_()
    buffers.source.zero_()


def door_candidates(case: Door, groups: Groups) -> dict[str, Candidate]:
    tensor = torch.zeros(1)
    group = groups.by_name[case.backend]
    start: Callable[..., Any] = dist.all_reduce  # with async_op, too, torch's type allows None
    return {
        "dist": lambda: dist.all_reduce(tensor, group=group),
        "dist async": lambda: start(tensor, group=group, async_op=True).wait(),
        "weft.comm": lambda: weft.comm.all_reduce(tensor, group=group).wait(),
    }


# -- the command -------------------------------------------------------------------


def main() -> None:
    question = ask(
        "collectives",
        __doc__,
        lambda parser: parser.add_argument("--no-mpi", action="store_true", help="leave MPICH out"),
    )
    largest = QUICK_BYTES if question.is_quick else math.inf
    cases = question.choose([case for case in CASES if isinstance(case, Door) or case.num_bytes <= largest])
    mpiexec = None if question.options.no_mpi else find_mpiexec()
    results: list[CaseResult] = []
    for num_ranks in dict.fromkeys(case.num_ranks for case in cases):
        part = [case for case in cases if case.num_ranks == num_ranks]
        # MPICH polls without end: with more ranks than cores a call takes seconds.
        launcher = mpiexec if num_ranks <= (os.cpu_count() or 1) else None
        options = (question.rounds, question.is_quick, launcher is not None)
        results += run_ranks(measure_cases, num_ranks, part, *options, mpiexec=launcher)
    if mpiexec:
        note = "MPICH is left out where there are more ranks than cores: it polls, and takes seconds."
    else:
        note = "MPICH was not measured: it needs mpi4py and mpiexec (`pip install -e .[bench]`)."
    question.answer(results, [goal for case in cases for goal in plan_goals(case)], [note])


if __name__ == "__main__":
    sys.exit(main())
