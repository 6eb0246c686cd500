"""What process-ranks run: hooks by name on several buckets at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.hook_bodies.made import SHAPES, Shapes, assert_ranks_agree, exact_mean, make_bucket
from weft.comm_hooks import GradBucket, chain
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from weft.comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

# The gradients are some 1e-2 at most: what each hook may be away from their mean.
EXACT, HALF, BYTE = 2e-9, 1e-4, 2e-4
NUM_BUCKETS = 5
LARGE: Shapes = [(300, 500), (300,)]


def _exact_power_sgd() -> PowerSGDState:
    """Of full rank, from the first step on."""
    return PowerSGDState(
        None,
        matrix_approximation_rank=400,
        start_powerSGD_iter=0,
        min_compression_rate=0.0,
        use_error_feedback=False,
        warm_start=False,
    )


def _feedback() -> QuantizationState:
    return QuantizationState(error_feedback=True)


Case = tuple[Any, Callable[[], Any], float]
HOOKS: dict[str, Case] = {
    "allreduce": (allreduce_hook, lambda: None, EXACT),
    "fp16": (fp16_compress_hook, lambda: None, HALF),
    "bf16": (bf16_compress_hook, lambda: None, HALF),
    "fp16_wrapper": (fp16_compress_wrapper(quantization_perchannel_hook), lambda: None, BYTE),
    "int8_pertensor": (quantization_pertensor_hook, lambda: None, BYTE),
    "int8_perchannel": (quantization_perchannel_hook, _feedback, BYTE),
    "fp8": (quantization_pertensor_hook, lambda: QuantizationState(dtype=torch.float8_e4m3fn), 1e-3),
    "power_sgd": (powerSGD_hook, _exact_power_sgd, 1e-7),
    "batched_power_sgd": (batched_powerSGD_hook, _exact_power_sgd, 1e-7),
    "chain": (chain(allreduce_hook, quantization_perchannel_hook), lambda: None, BYTE),
}


def reduce_many(names: Sequence[str]) -> None:
    """Each hook for two steps of dense buckets and a sparse one, all in flight at once."""
    for name in names:
        hook, make_state, tolerance = HOOKS[name]
        state = make_state()
        for step in range(2):
            _reduce_step(name, hook, state, step, tolerance)


def _reduce_step(name: str, hook: Any, state: Any, step: int, tolerance: float) -> None:
    shapes = [LARGE if index % 2 else SHAPES for index in range(NUM_BUCKETS)]
    seeds = [step * NUM_BUCKETS + index for index in range(NUM_BUCKETS)]
    futures = [
        hook(state, make_bucket(shapes[index], index=index, is_last=False, seed=seeds[index]))
        for index in range(NUM_BUCKETS)
    ]
    futures.append(hook(state, _sparse_bucket()))
    *means, sparse = [future.wait() for future in futures]
    for index, mean in enumerate(means):
        right = exact_mean(shapes[index], seed=seeds[index])
        apart = (mean.double() - right).abs().max().item()
        assert apart <= tolerance, f"{name}: {apart:.3g} apart, {tolerance:.3g} allowed"
        assert_ranks_agree(mean)
    size = dist.get_world_size()
    torch.testing.assert_close(sparse.to_dense(), torch.tensor([1.0, *[1 / size] * size]))


def reduce_many_on_gpu() -> None:
    """Each hook on buckets that the current stream has only just begun to make."""
    for name in sorted(HOOKS):
        hook, make_state, tolerance = HOOKS[name]
        state = make_state()
        for step in range(2):
            futures = [
                hook(state, _late_bucket(index, seed=step * NUM_BUCKETS + index))
                for index in range(NUM_BUCKETS)
            ]
            for index, future in enumerate(futures):
                mean = future.wait().double().cpu()
                right = exact_mean(LARGE, seed=step * NUM_BUCKETS + index)
                torch.testing.assert_close(mean, right, rtol=0, atol=max(tolerance, 1e-7), msg=name)


def _late_bucket(index: int, seed: int) -> GradBucket:
    on_cpu = make_bucket(LARGE, index=index, is_last=index == NUM_BUCKETS - 1, seed=seed)
    flat = torch.zeros_like(on_cpu.buffer(), device="cuda")
    torch.cuda._sleep(10_000_000)  # the GPU is busy: whoever reads too early finds zeros
    flat.copy_(on_cpu.buffer().pin_memory(), non_blocking=True)
    return on_cpu.with_buffer(flat)


def _sparse_bucket() -> GradBucket:
    """Each rank has a row of its own and shares row 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = torch.tensor([[0, rank + 1]])
    rows = torch.sparse_coo_tensor(places, torch.ones(2), (size + 1,), check_invariants=True).coalesce()
    return GradBucket(NUM_BUCKETS, rows, [torch.empty(size + 1)], is_last=True)
