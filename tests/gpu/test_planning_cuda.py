"""A plan's memory is what torch's allocator gives out on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.planning_bodies import on_gpu
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_memory_is_that_of_a_run(strategy: str) -> None:
    planned = on_gpu.plan_step(strategy, 2).memory
    measured = shared_pool(2).run(
        on_gpu.measure_peak, args=(strategy,), backend="weft", timeout=120, collective_timeout=60
    )[0]
    # Buckets of gradients are memory of the local group there, which is not the allocator's.
    expected = planned.total - (planned.gradients if strategy == "ddp" else 0)
    assert abs(expected - measured) <= 0.1 * measured, f"{strategy}: {planned}, {measured:,} bytes"
