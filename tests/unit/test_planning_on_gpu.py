"""A plan for GPUs has the memory that a GPU would have, though its tensors are the CPU's."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from tests.planning_bodies.on_gpu import make_job
from weft.planning import EIGHT_GPUS
from weft.planning.on_gpu import as_on_gpu
from weft.planning.simulate import Simulated, simulate
from weft.training.layout import plan_layout
from weft.training.model import ModelSize

SIZE = ModelSize(width=64, depth=2, num_heads=4, hidden=128, context=32)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_norm_keeps_its_input_and_a_number_a_row(is_on: bool) -> None:
    norm, rows = nn.RMSNorm(64), torch.randn(32, 64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with as_on_gpu(is_on=is_on), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        norm(rows)
    large = {tensor.data_ptr() for tensor in kept if tensor.numel() == rows.numel()}
    assert (large == {rows.data_ptr()}) == is_on


def test_sharded_gradients_are_not_kept_for_the_next_step() -> None:
    on_gpu, on_cpu = _plan("cuda"), _plan("cpu")
    assert on_cpu.memory.gradients > 0
    assert on_gpu.memory.gradients == 0


def _plan(device: str) -> Simulated:
    machine = dataclasses.replace(EIGHT_GPUS, device=device)
    # So many rows that most memory is there when backward begins, before it has made any gradient.
    return simulate(partial(make_job, SIZE), plan_layout("fsdp", 2), machine, batch=16)
