"""Gradient hooks on sharded modules, on ranks that are processes: over gloo and the local group."""

from __future__ import annotations

import pytest
import torch

from tests.fsdp_bodies import comm_hooks as bodies
from weft.testing.pool import shared_pool


def every_body() -> None:
    """In one job: starting a group costs more than most of them."""
    bodies.plain_means(torch.float64)
    bodies.narrow_means(torch.float32)
    bodies.quantized_means(torch.int8, torch.float32)
    bodies.quantized_means(torch.float8_e4m3fn, torch.float32, [(70_001,)])
    bodies.train_with_named(["allreduce", "fp16", "int8_perchannel", "power_sgd", "chain"])
    bodies.other_experts("int8_perchannel")


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_means(ranks: int, backend: str) -> None:
    shared_pool(ranks).run(every_body, backend=backend, timeout=90, collective_timeout=20)
