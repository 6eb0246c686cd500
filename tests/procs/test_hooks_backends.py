"""Hooks on process-ranks, over gloo and the local group: many buckets in flight, and torch's own numbers."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from tests.hook_bodies import jobs
from tests.hook_bodies.made import Shapes, make_bucket, run
from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from weft.testing import on_ranks, shared_pool

MATRICES: Shapes = [(40, 30), (9,), (25, 50), (40, 30), (3, 2, 5)]


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("names", [sorted(jobs.HOOKS)[::2], sorted(jobs.HOOKS)[1::2]], ids="-".join)
def test_many_buckets_in_flight(names: list[str], ranks: int, backend: str) -> None:
    shared_pool(ranks).run(jobs.reduce_many, args=(names,), backend=backend, timeout=60)


@pytest.mark.skipif(
    "WEFT_TEST_TORCH_POWERSGD" not in os.environ, reason="torch's own PowerSGD aborts now and then on gloo"
)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
@on_ranks(2, kind="process", backend="gloo")
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
