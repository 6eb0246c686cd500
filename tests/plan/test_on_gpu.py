"""A plan for GPUs has the memory that a GPU would have, though its tensors are the CPU's.

And it is what torch's allocator gives out in real steps on a GPU.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from weft.planning import EIGHT_GPUS
from weft.planning.job import Job, with_rows
from weft.planning.on_gpu import as_on_gpu
from weft.planning.simulate import Simulated, simulate
from weft.testing.pool import shared_pool
from weft.training.layout import plan_layout
from weft.training.model import ModelSize, make_model, next_byte_loss
from weft.training.strategies import transformer_plan
from weft.training.trainer import Strategy, Trainer

SMALL = ModelSize(width=64, depth=2, num_heads=4, hidden=128, context=32)
# Large enough that the workspaces of libraries don't matter, which a plan has not.
LARGE = ModelSize(width=1024, depth=6, num_heads=16, hidden=2816, context=512)
GLOBAL_BATCH = 8


def make_job(size: ModelSize) -> Job:
    """The model and its batch."""
    tokens = torch.zeros(1, size.context, dtype=torch.long)
    return Job(make_model(size, 0), tokens, tokens, next_byte_loss, transformer_plan())


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
    return simulate(partial(make_job, SMALL), plan_layout("fsdp", 2), machine, batch=16)


# -- real steps on a GPU ------------------------------------------------------------------


def plan_step(strategy: str, num_ranks: int) -> Simulated:
    """What a plan says."""
    layout = plan_layout(strategy, num_ranks)
    batch = GLOBAL_BATCH // layout.num_shares
    return simulate(partial(make_job, LARGE), layout, EIGHT_GPUS, batch=batch)


def measure_peak(strategy: str) -> int:
    """The bytes that this rank has at most in a steady step, without what was there before the model."""
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.ones(512, 512, device=device, requires_grad=True)
    (square @ square).sum().backward()  # the workspaces of libraries
    del square
    before = torch.cuda.memory_allocated(device)
    job = make_job(LARGE)
    # A plan has an update that goes from parameter to parameter. The batched one, torch's default on a GPU,
    # takes more memory, and no mixture of DTensors and other tensors.
    optimizer = partial(AdamW, foreach=False)
    trainer = Trainer(job.model, job.loss, optimizer, Strategy(strategy, tp_plan=transformer_plan()))
    batch = GLOBAL_BATCH // trainer.layout.num_shares
    inputs, targets = with_rows(job.inputs, batch), with_rows(job.targets, batch)
    for _ in range(3):
        trainer.step(inputs, targets)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        trainer.step(inputs, targets)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    trainer.close()
    return peak


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_memory_is_that_of_a_run(strategy: str) -> None:
    planned = plan_step(strategy, 2).memory
    measured = shared_pool(2).run(
        measure_peak, args=(strategy,), backend="weft", timeout=120, collective_timeout=60
    )[0]
    # Buckets of gradients are memory of the local group there, which is not the allocator's.
    expected = planned.total - (planned.gradients if strategy == "ddp" else 0)
    assert abs(expected - measured) <= 0.1 * measured, f"{strategy}: {planned}, {measured:,} bytes"
