"""The memory of real steps on a GPU, as torch's allocator counts it, and the plan of them."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import AdamW

from weft.planning import EIGHT_GPUS
from weft.planning.job import Job, with_rows
from weft.planning.simulate import Simulated, simulate
from weft.training.layout import plan_layout
from weft.training.model import ModelSize, make_model, next_byte_loss
from weft.training.strategies import transformer_plan
from weft.training.trainer import Strategy, Trainer

# Large enough that the workspaces of libraries don't matter, which a plan has not.
SIZE = ModelSize(width=1024, depth=6, num_heads=16, hidden=2816, context=512)
GLOBAL_BATCH = 8


def make_job(size: ModelSize) -> Job:
    """The model and its batch."""
    tokens = torch.zeros(1, size.context, dtype=torch.long)
    return Job(make_model(size, 0), tokens, tokens, next_byte_loss, transformer_plan())


def plan_step(strategy: str, num_ranks: int) -> Simulated:
    """What a plan says."""
    layout = plan_layout(strategy, num_ranks)
    batch = GLOBAL_BATCH // layout.num_shares
    return simulate(partial(make_job, SIZE), layout, EIGHT_GPUS, batch=batch)


def measure_peak(strategy: str) -> int:
    """The bytes that this rank has at most in a steady step, without what was there before the model."""
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.ones(512, 512, device=device, requires_grad=True)
    (square @ square).sum().backward()  # the workspaces of libraries
    del square
    before = torch.cuda.memory_allocated(device)
    job = make_job(SIZE)
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
