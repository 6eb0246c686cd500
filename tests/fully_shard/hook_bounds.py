"""Buckets in parts, the gradient hooks of the tests, and how far off their means may be.

Bounds follow from the formats: a number of p bits is rounded by at most 2^-p of it, an int8 code by half
a scale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import Shapes, assert_within, numbers
from tests.fully_shard.models import net
from tests.fully_shard.twins import Loss, Twin, make_rows, mean_square, part_of, rows_of
from weft.comm_hooks import GradBucket, chain
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from weft.comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients

# Of one rank's part. Its 2389 numbers are no multiple of anything that chunks are aligned to.
PIECES: Shapes = [(20, 40), (7,), (1,), (0,), (33, 47), (5, 2, 3)]
QUANTIZING_HOOKS = [quantization_pertensor_hook, quantization_perchannel_hook]


def numel_of(pieces: Shapes) -> int:
    return sum(torch.empty(shape).numel() for shape in pieces)


def bucket_in_parts(
    group: dist.ProcessGroup | None = None,
    pieces: Shapes = PIECES,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> GradBucket:
    """As a module gives it that is sharded over the group; None: over the world."""
    group = group or dist.group.WORLD
    num_parts, part = group.size(), numel_of(pieces)
    starts = [sum(numel_of([shape]) for shape in pieces[:at]) for at in range(len(pieces))]
    return GradBucket(
        3,
        numbers(dist.get_rank(), num_parts * part, seed, dtype) * scale,
        [torch.empty(shape, device="meta") for shape in pieces] * num_parts,
        [at * part + start for at in range(num_parts) for start in starts],
        is_last=True,
        wanted=(group.rank(), num_parts),
        sharers=tuple(dist.get_process_group_ranks(group)),
    )


def of_every_rank(bucket: GradBucket, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What each rank of the world has in such a bucket, as rows in float64."""
    numel = bucket.buffer().numel()
    ranks = range(dist.get_world_size())
    return torch.stack([numbers(rank, numel, seed, dtype).double() for rank in ranks])


def float_bound(wanted: torch.Tensor, bits: int, least: float = 0.0) -> torch.Tensor:
    """Of a mean whose quotients and sums are rounded to so many bits: one rounding of each quotient, and one
    of each sum, which is no larger than the quotients together.
    """
    unit, size = 2.0**-bits, len(wanted)
    together = wanted.abs().mean(0) * (1 + size * unit)
    return together * unit * size + size * least


def plan_of(hook: Any, bucket: GradBucket, size: int) -> QuantizePlan:
    numel = bucket.buffer().numel()
    if hook is quantization_perchannel_hook:
        return plan_blocks(numel, size, 512, bucket.starts(), in_parts=True)
    return plan_gradients(numel, size, bucket.starts(), is_cpu=True, in_parts=True)


def row_maxima(values: torch.Tensor, plan: QuantizePlan) -> torch.Tensor:
    """Each number's row's largest absolute value, of all ranks' buckets (2D)."""
    maxima = torch.zeros_like(values)
    for chunk in plan.chunks:
        for run_ in chunk.runs:
            start = chunk.start + run_.start
            rows = values[:, start : start + run_.numel].unflatten(1, (run_.num_rows, run_.row_numel))
            largest = rows.abs().amax(2, keepdim=True).expand_as(rows)
            maxima[:, start : start + run_.numel] = largest.flatten(1)
    return maxima


def sent_bound(hook: Any, bucket: GradBucket, every: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the other ranks' codes may be off, over the number of ranks: nothing else is rounded to bytes."""
    plan = plan_of(hook, bucket, len(every))
    off = row_maxima(every, plan) * 0.5 / 127
    if dtype is not torch.int8:
        # Three bits behind the point; below a scale's 2^-6 steps of 2^-9.
        off = every.abs() * 2.0**-4 + row_maxima(every, plan) / 448 * 2.0**-10
    off[dist.get_rank()] = 0.0
    roundings = every.abs().sum(0) * 2.0**-23 * len(every)  # of sums in float32, and of scales
    return off.sum(0) / len(every) * (1 + 2.0**-20) + roundings


def ops(events: weft.comm.Events) -> list[str]:
    """The collectives that reduce gradients."""
    named = ("all_reduce", "reduce_scatter_tensor", "all_to_all_single", "all_gather_into_tensor")
    return [event.op for event in events if event.op in named]


# Sharded modules

Bound = Callable[[torch.Tensor], torch.Tensor]  # of what each rank's gradient of a parameter is


def exact(every: torch.Tensor) -> torch.Tensor:
    """Roundings of float64."""
    return every.abs().amax().expand(every.shape[1:]) * 1e-13


def half(every: torch.Tensor) -> torch.Tensor:
    """float16."""
    return float_bound(every, 11, 2.0**-25)


def brief(every: torch.Tensor) -> torch.Tensor:
    """bfloat16."""
    return float_bound(every, 8)


def byte(every: torch.Tensor) -> torch.Tensor:
    """int8: half a scale of each rank's, which is no larger than that of the whole gradient."""
    scales = every.abs().flatten(1).amax(1) / 127
    return scales.mean().expand(every.shape[1:]) * 0.5 + every.abs().sum(0) * 2.0**-22


def byte_twice(every: torch.Tensor) -> torch.Tensor:
    """int8 where the mean is sent, too: half a scale of it more."""
    largest = every.mean(0).abs().amax() + byte(every).amax()
    return byte(every) + largest * 0.5 / 127


def byte_with_feedback(every: torch.Tensor) -> torch.Tensor:
    """This step's error and that of the one before."""
    return byte(every) * (2 + 2 / 127)


def full_rank(every: torch.Tensor) -> torch.Tensor:
    """Products of factors in float64."""
    return exact(every) * 100


def check_within(twin: Twin, rows: torch.Tensor, bound: Bound, loss: Loss = mean_square) -> None:
    """Each gradient is the mean, as precisely as a format has it."""
    single = copy.deepcopy(twin.single)
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in single.named_parameters()}
    for rank in range(dist.get_world_size()):
        single.zero_grad()
        loss(single, rows_of(rows, rank), rank).backward()
        for name, param in single.named_parameters():
            found[name].append(torch.zeros_like(param) if param.grad is None else param.grad.clone())
    for name, param in twin.sharded.named_parameters():
        every = torch.stack(found[name])
        assert (param.grad is None) == (not every.any()), name
        if param.grad is not None and param.grad.to_local().numel():
            parts = [part_of(full, param.grad) for full in (every.mean(0), bound(every))]
            assert_within(param.grad.to_local(), *parts)


def exact_power_sgd(start: int = 0) -> PowerSGDState:
    """Of full rank, so that nothing is left out."""
    return PowerSGDState(
        None,
        matrix_approximation_rank=40,
        start_powerSGD_iter=start,
        min_compression_rate=0.0,
        use_error_feedback=False,
        warm_start=False,
    )


def train_with(hook: Any, state: Any, bound: Bound, **options: Any) -> None:
    """Two steps of a float64 model."""
    twin = Twin(net(), **options)
    twin.sharded.register_comm_hook(state, hook)
    for step in range(2):
        twin.backward(make_rows(step))
        check_within(twin, make_rows(step), bound)
        for model in (twin.sharded, twin.single):
            model.zero_grad()


Case = tuple[Callable[..., Any], Callable[[], Any], Bound]
HOOKS: dict[str, Case] = {
    "allreduce": (allreduce_hook, lambda: None, exact),
    "fp16": (fp16_compress_hook, lambda: None, half),
    "bf16": (bf16_compress_hook, lambda: None, brief),
    "int8_pertensor": (quantization_pertensor_hook, lambda: None, byte),
    "int8_perchannel": (
        quantization_perchannel_hook,
        lambda: QuantizationState(error_feedback=True),
        byte_with_feedback,
    ),
    "power_sgd": (powerSGD_hook, exact_power_sgd, full_rank),
    "batched_power_sgd": (batched_powerSGD_hook, exact_power_sgd, full_rank),
    "chain": (chain(allreduce_hook, quantization_perchannel_hook), lambda: None, byte),
}
