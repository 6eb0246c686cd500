"""Hooks on ranks that are processes, over gloo and the local group, and on a GPU: many buckets in flight."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from tests.comm_hooks.buckets import SHAPES, Shapes, assert_ranks_agree, exact_mean, make_bucket, run
from tests.ranks import run_on
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


@run_on(weft=2, gloo=2, name=["int8_perchannel"])
@run_on(weft=2, gloo=2, name=sorted(HOOKS.keys() - {"int8_perchannel"}), full=True)
@run_on(weft=3, gloo=3, name=sorted(HOOKS), full=True)
def test_many_buckets_in_flight(name: str) -> None:
    """Two steps of dense buckets and a sparse one, all in flight at once."""
    hook, make_state, tolerance = HOOKS[name]
    state = make_state()
    for step in range(2):
        reduce_step(name, hook, state, step, tolerance)


def reduce_step(name: str, hook: Any, state: Any, step: int, tolerance: float) -> None:
    shapes = [LARGE if index % 2 else SHAPES for index in range(NUM_BUCKETS)]
    seeds = [step * NUM_BUCKETS + index for index in range(NUM_BUCKETS)]
    futures = [
        hook(state, make_bucket(shapes[index], index=index, is_last=False, seed=seeds[index]))
        for index in range(NUM_BUCKETS)
    ]
    futures.append(hook(state, sparse_bucket()))
    *means, sparse = [future.wait() for future in futures]
    for index, mean in enumerate(means):
        right = exact_mean(shapes[index], seed=seeds[index])
        apart = (mean.double() - right).abs().max().item()
        assert apart <= tolerance, f"{name}: {apart:.3g} apart, {tolerance:.3g} allowed"
        assert_ranks_agree(mean)
    size = dist.get_world_size()
    torch.testing.assert_close(sparse.to_dense(), torch.tensor([1.0, *[1 / size] * size]))


def sparse_bucket() -> GradBucket:
    """Each rank has a row of its own and shares row 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = torch.tensor([[0, rank + 1]])
    rows = torch.sparse_coo_tensor(places, torch.ones(2), (size + 1,), check_invariants=True).coalesce()
    return GradBucket(NUM_BUCKETS, rows, [torch.empty(size + 1)], is_last=True)


@run_on(gpu_threads=(2, 3), name=sorted(HOOKS), timeout=120, collective_timeout=60)
def test_buckets_that_are_being_made(name: str) -> None:
    """Of gradients that the current stream has only just begun to make."""
    hook, make_state, tolerance = HOOKS[name]
    state = make_state()
    for step in range(2):
        futures = [
            hook(state, late_bucket(index, seed=step * NUM_BUCKETS + index)) for index in range(NUM_BUCKETS)
        ]
        for index, future in enumerate(futures):
            mean = future.wait().double().cpu()
            right = exact_mean(LARGE, seed=step * NUM_BUCKETS + index)
            torch.testing.assert_close(mean, right, rtol=0, atol=max(tolerance, 1e-7), msg=name)


def late_bucket(index: int, seed: int) -> GradBucket:
    on_cpu = make_bucket(LARGE, index=index, is_last=index == NUM_BUCKETS - 1, seed=seed)
    flat = torch.zeros_like(on_cpu.buffer(), device="cuda")
    torch.cuda._sleep(10_000_000)  # the GPU is busy: whoever reads too early finds zeros
    flat.copy_(on_cpu.buffer().pin_memory(), non_blocking=True)
    return on_cpu.with_buffer(flat)


# Beside torch's

MATRICES: Shapes = [(40, 30), (9,), (25, 50), (40, 30), (3, 2, 5)]


@run_on(gloo=2, timeout=60, full=True)
@pytest.mark.skipif(
    "WEFT_TEST_TORCH_POWERSGD" not in os.environ, reason="torch's own PowerSGD aborts now and then on gloo"
)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
def test_the_numbers_are_torchs(rank: int, warm_start: bool, feedback: bool) -> None:
    options = {
        "matrix_approximation_rank": rank,
        "start_powerSGD_iter": 2,
        "warm_start": warm_start,
        "use_error_feedback": feedback,
        "random_seed": 3,
    }
    ours = PowerSGDState(dist.group.WORLD, **options)
    theirs = torch_power_sgd.PowerSGDState(dist.group.WORLD, **options)
    shapes = MATRICES
    for seed in range(6):
        seen = run(powerSGD_hook, ours, make_bucket(shapes, seed=seed))
        right = run(torch_power_sgd.powerSGD_hook, theirs, make_bucket(shapes, seed=seed))
        largest = float(right.abs().max())
        torch.testing.assert_close(seen, right, rtol=0, atol=largest * 1e-4)
    assert ours.compression_stats() == theirs.compression_stats()
    assert ours.iter == theirs.iter


# A program that used hooks ends as any other

PROGRAM = """
import torch
import weft
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook


def job():
    model = weft.DistributedDataParallel(torch.nn.Linear(40, 40))
    model.register_comm_hook(None, quantization_perchannel_hook)
    model(torch.ones(2, 40)).sum().backward()


if __name__ == "__main__":
    weft.launch(job, ranks=2, kind={kind!r})
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_a_program_with_hooks_ends_well(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(kind=kind))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (engine,) = done.stderr.splitlines()
    assert engine.startswith("weft: 2 ranks on backend 'weft': ")
