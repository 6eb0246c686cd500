"""What the demo's ranks run. Each function is called on every rank, inside weft.launch.

A collective is launched with `weft.comm` and waited for: the same line works on every
backend.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.demo.table import format_bytes

Call = Callable[[], object]


def average_rank() -> float:
    """The smallest distributed program: average one number over all ranks."""
    value = torch.tensor([float(dist.get_rank())])
    weft.comm.all_reduce(value).wait()
    return value.item() / dist.get_world_size()


def record_step() -> list[weft.comm.Event]:
    """Train for one step, by hand: each rank has its own batch, and gradients are averaged."""
    model = nn.Linear(256, 256)
    for param in model.parameters():
        weft.comm.broadcast(param.data, src=0).wait()  # all ranks start from rank 0's parameters
    with weft.record() as events:
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        weft.comm.all_reduce_coalesced(grads, dist.ReduceOp.AVG).wait()
        weft.comm.all_reduce(loss.detach(), dist.ReduceOp.AVG).wait()
    return list(events)


@dataclass(frozen=True)
class Way:
    """A way for tensors to go: a backend, the device they lie on, and whether the group allocated them."""

    name: str
    backend: str
    device: str = "cpu"
    is_allocated: bool = False


@dataclass(frozen=True)
class Timing:
    """How long one collective took, by the name of the way."""

    op: str
    num_bytes: int
    median_secs: dict[str, float]


def list_ways(num_ranks: int) -> list[Way]:
    """All ways that this machine has, gloo first: the others are compared with it."""
    ways: list[Way] = []
    if dist.is_gloo_available():
        ways.append(Way("gloo", "gloo"))
    if torch.cuda.is_available():
        # NCCL wants a GPU for every rank; weft's ranks may share one.
        if dist.is_nccl_available() and torch.cuda.device_count() >= num_ranks > 1:
            ways.append(Way("nccl GPU", "nccl", "cuda"))
        if sys.platform == "linux":
            ways.append(Way("weft GPU", "weft", "cuda"))
    if sys.platform == "linux":
        ways += [Way("weft", "weft"), Way("weft allocated", "weft", is_allocated=True)]
    return ways


def time_collectives(ways: Sequence[Way], sizes: Sequence[int]) -> list[Timing]:
    """Check and time every collective, at every size, over every way."""
    torch.set_num_threads(1)
    world = weft.init()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    # Every rank makes the same groups in the same order: making one is a collective too.
    groups = {backend: make_group(backend) for backend in dict.fromkeys(way.backend for way in ways)}
    timings: list[Timing] = []
    for make_call in (all_reduce_call, all_gather_call, reduce_scatter_call):
        op = make_call.__name__.removesuffix("_call")
        for num_bytes in sizes:
            if world.rank == 0:
                print(f"   {op} {format_bytes(num_bytes)} ...", file=sys.stderr, flush=True)
            calls = {way.name: make_call(way, groups[way.backend], num_bytes) for way in ways}
            timings.append(Timing(op, num_bytes, time_in_turns(calls)))
    return timings


def all_reduce_call(way: Way, group: dist.ProcessGroup, num_bytes: int) -> Call:
    """Sum the ranks' tensors, in place."""
    tensor = make_tensor(way, group, num_bytes // 4)

    def call() -> None:
        weft.comm.all_reduce(tensor, group=group).wait()

    tensor.fill_(group.rank() + 1)
    call()
    check_equal(tensor, sum_of_ranks(group), "all_reduce", way)
    tensor.zero_()  # so that many calls in a row don't overflow
    return synchronized(call, way)


def all_gather_call(way: Way, group: dist.ProcessGroup, num_bytes: int) -> Call:
    """Copy every rank's shard into a full tensor."""
    shard_numel = max(num_bytes // 4 // group.size(), 1)
    shard = make_tensor(way, group, shard_numel)
    full = make_tensor(way, group, shard_numel * group.size())

    def call() -> None:
        weft.comm.all_gather_into_tensor(full, shard, group=group).wait()

    shard.fill_(group.rank() + 1)
    call()
    for rank, part in enumerate(full.chunk(group.size())):
        check_equal(part, rank + 1, "all_gather", way)
    return synchronized(call, way)


def reduce_scatter_call(way: Way, group: dist.ProcessGroup, num_bytes: int) -> Call:
    """Sum the ranks' full tensors, and keep this rank's shard of the sum."""
    shard_numel = max(num_bytes // 4 // group.size(), 1)
    shard = make_tensor(way, group, shard_numel)
    full = make_tensor(way, group, shard_numel * group.size())

    def call() -> None:
        weft.comm.reduce_scatter_tensor(shard, full, group=group).wait()

    full.fill_(group.rank() + 1)
    call()
    check_equal(shard, sum_of_ranks(group), "reduce_scatter", way)
    return synchronized(call, way)


def make_group(backend: str) -> dist.ProcessGroup:
    """A group of all ranks, with a backend of its own."""
    return cast(dist.ProcessGroup, dist.new_group(backend=backend))


def make_tensor(way: Way, group: dist.ProcessGroup, numel: int) -> torch.Tensor:
    """A tensor for this way: an ordinary one, or one in memory that peers read where it lies."""
    if way.is_allocated:
        return weft.comm.allocate((max(numel, 1),), device=way.device, group=group)
    return torch.zeros(max(numel, 1), device=way.device)


def check_equal(tensor: torch.Tensor, wanted: int, op: str, way: Way) -> None:
    """Raise unless all of the tensor is what the collective should have made it."""
    if not bool((tensor == wanted).all()):
        raise weft.InternalError(
            f"rank {dist.get_rank()}: {op} over {way.name} gave {tensor}; all must be {wanted}."
        )


def sum_of_ranks(group: dist.ProcessGroup) -> int:
    """1 + 2 + ... + the number of ranks."""
    return group.size() * (group.size() + 1) // 2


def synchronized(call: Call, way: Way) -> Call:
    """The call, up to the end of its work on the GPU: there, `wait` lets the host go on before."""
    if way.device == "cpu":
        return call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_wait


def time_in_turns(calls: dict[str, Call], num_rounds: int = 3, block_secs: float = 0.05) -> dict[str, float]:
    """The median time of each call, in seconds, on the slowest rank.

    They take turns, so that whatever else this machine does slows all of them alike.
    """
    timed: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            # How many calls fill a block is something the ranks have to agree on.
            num_calls = round(min(max(block_secs / agree_on(time_once(call)), 1), 50))
            timed[name] += [time_once(call) for _ in range(num_calls)]
    return {name: agree_on(statistics.median(secs)) for name, secs in timed.items()}


def time_once(call: Call) -> float:
    """The seconds that one call takes on this rank."""
    start_secs = time.perf_counter()
    call()
    return time.perf_counter() - start_secs


def agree_on(secs: float) -> float:
    """The largest of the ranks' values, on every rank."""
    longest = torch.tensor([secs], dtype=torch.float64)
    weft.comm.all_reduce(longest, dist.ReduceOp.MAX).wait()
    return longest.item()
