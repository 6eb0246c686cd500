"""What a rank measures of its machine: operations of real training steps, and collectives.

All ranks measure at once, so what they share (caches, memory, cores) is shared as in a run. Operations are
timed by the thread's own time, so that whatever else the machine does at the moment doesn't count.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from weft import comm
from weft.planning.machine import Curve, Work
from weft.planning.operations import tensors_in
from weft.planning.work import work_of
from weft.training.model import ModelSize, make_model, next_byte_loss

# From matrices that fit into a core's cache to those of model "small".
_SIZES = (
    (ModelSize(width=64, depth=1, num_heads=4, hidden=176, context=32), 2),
    (ModelSize(width=128, depth=1, num_heads=4, hidden=352, context=64), 4),
    (ModelSize(width=256, depth=2, num_heads=4, hidden=704, context=128), 4),
    (ModelSize(width=384, depth=2, num_heads=8, hidden=1024, context=256), 4),
)
_NUM_STEPS = 5
_NUM_CALLS = 9
_MESSAGE_BYTES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24)


@dataclass(frozen=True)
class Measurements:
    """What one rank has seen."""

    ops: dict[str, Curve]
    op_secs: float
    dtensor_secs: float
    messages: dict[str, Curve]
    overlap_cost: float


class _Timing(TorchDispatchMode):
    """Times each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Work, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        start = time.thread_time()
        result = func(*args, **kwargs)
        secs = time.thread_time() - start
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        is_view = bool(outputs) and any(_shares_memory(outputs[0], tensor) for tensor in inputs)
        is_view = is_view and not func._schema.is_mutable
        self.seen.append((work_of(func, inputs, outputs, is_view=is_view), secs))
        return result


def measure_rank(num_threads: int, num_sizes: int = len(_SIZES)) -> Measurements:
    """Measure on this rank, together with all others. `num_sizes` models are enough, the smallest first."""
    num_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        ops, op_secs = _measure_ops(num_sizes)
        messages = _measure_messages()
        return Measurements(ops, op_secs, _measure_dtensor(), messages, _measure_overlap())
    finally:
        torch.set_num_threads(num_before)


def _measure_ops(num_sizes: int) -> tuple[dict[str, Curve], float]:
    timed: list[tuple[Work, float]] = []
    besides: list[float] = []
    for size, batch in _SIZES[:num_sizes]:
        step = _make_step(size, batch)
        for _ in range(2):
            step()
        dist.barrier()
        plain_secs = _usual_secs(step, _NUM_STEPS, time.thread_time)
        timing = _Timing()
        with timing:
            for _ in range(_NUM_STEPS):
                step()
        timed += timing.seen
        num_ops = len(timing.seen) / _NUM_STEPS
        in_ops = _typical_secs(timing.seen) / _NUM_STEPS
        besides.append(max(0.0, plain_secs - in_ops) / num_ops)
    return _curves_of(timed), statistics.median(besides)


def _make_step(size: ModelSize, batch: int) -> Callable[[], None]:
    model: nn.Module = make_model(size, 0)
    optimizer: Optimizer = AdamW(model.parameters())
    tokens = torch.zeros(batch, size.context, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        next_byte_loss(model(tokens), tokens).backward()
        optimizer.step()

    return step


def _curves_of(timed: Iterable[tuple[Work, float]]) -> dict[str, Curve]:
    """The median time of each operation at each size of its work."""
    by_name: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work, secs in timed:
        if not work.is_view:
            by_name[work.name][max(1.0, work.flops or work.num_bytes)].append(secs)
    return {
        name: Curve(tuple((size, statistics.median(secs)) for size, secs in sorted(by_size.items())))
        for name, by_size in by_name.items()
    }


def _typical_secs(timed: Sequence[tuple[Work, float]]) -> float:
    """The time of all of them, each taken at the median of its equals: a hiccup is no part of it."""
    by_work: dict[Work, list[float]] = defaultdict(list)
    for work, secs in timed:
        by_work[work].append(secs)
    return sum(statistics.median(secs) * len(secs) for secs in by_work.values())


def _measure_messages() -> dict[str, Curve]:
    size = dist.get_world_size()
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for num_bytes in _MESSAGE_BYTES:
        numel = num_bytes // 4 // size * size
        whole, other = comm.allocate((numel,)), comm.allocate((numel,))
        part = torch.zeros(numel // size)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: comm.all_reduce(whole).wait(),
            "all_gather": lambda whole=whole, part=part: comm.all_gather_into_tensor(whole, part).wait(),
            "reduce_scatter": lambda whole=whole, part=part: comm.reduce_scatter_tensor(part, whole).wait(),
            "all_to_all": lambda whole=whole, other=other: comm.all_to_all_single(other, whole).wait(),
            "broadcast": lambda whole=whole: comm.broadcast(whole, 0).wait(),
        }
        for op, call in calls.items():
            points[op].append((numel * 4, _together_secs(call)))
    points["control"] = [(1, _together_secs(lambda: comm.exchange_rows([1, 2, 3, 4, 5])))]
    return {op: Curve(tuple(found)) for op, found in points.items()}


def _measure_dtensor() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False)
    plain = torch.ones(8)
    both = [_usual_secs(lambda one=one: one.mul_(1.0), 200, time.thread_time) for one in (tensor, plain)]
    return max(0.0, both[0] - both[1])


def _measure_overlap() -> float:
    """What part of a collective's time is added to a computation beside it."""
    left = torch.ones(256, 256)
    flat = comm.allocate((2**21,))
    alone_secs = _together_secs(lambda: comm.all_reduce(flat).wait())
    one_secs = _usual_secs(lambda: torch.mm(left, left), 50)
    num_products = max(1, round(2 * alone_secs / one_secs))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(left, left)

    def both() -> None:
        handle = comm.all_reduce(flat)
        compute()
        handle.wait()

    added = _together_secs(both) - _together_secs(compute)
    return min(1.0, max(0.0, added / alone_secs))


def _together_secs(call: Callable[[], Any]) -> float:
    """The usual time of a call that all ranks begin together."""
    secs: list[float] = []
    for _ in range(_NUM_CALLS):
        dist.barrier()
        secs.append(_usual_secs(call, 1))
    return _usual(secs)


def _usual_secs(call: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    secs: list[float] = []
    for _ in range(times):
        start = clock()
        call()
        secs.append(clock() - start)
    return _usual(secs)


def _usual(secs: Sequence[float]) -> float:
    """The lower quartile: what is longer was held up by something else that the machine does."""
    return sorted(secs)[len(secs) // 4]


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
