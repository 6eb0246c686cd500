"""Random models, shardings and runs: gradients are a single process's, and torch's where torch can do it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import weft
from tests.fully_shard.random_models import Drawn, Run, Step, runs
from tests.fully_shard.twins import assert_is_shard, assert_is_sharded, describe, make_rows, rows_of
from weft.comm_hooks.default_hooks import allreduce_hook

# Sums over ranks are taken in another order than sums over rows, where terms may cancel.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
FLOORS = {torch.float64: 1e-15, torch.float32: 1e-7}


def loss_of(model: nn.Module, rows: torch.Tensor, step: Step, rank: int) -> Any:
    # A program may be empty and the bias frozen: the input needs a gradient, so that there is a backward.
    rows = rows.clone().requires_grad_()
    outputs = [model(rows + number, step.programs[rank]) for number in range(step.forwards)]
    return sum(output.square().mean() for output in outputs)


def zero(model: nn.Module, how: str) -> None:
    if how != "keep":
        model.zero_grad(set_to_none=how == "none")


def train(run: Run) -> None:
    single = Drawn(run)
    sharded: Any = copy.deepcopy(single)
    run.shard(sharded, weft.fully_shard)
    if run.has_hook:
        sharded.register_comm_hook(None, allreduce_hook)
    assert_is_sharded(sharded, single)
    models = [sharded]
    if run.fits_torch:
        models.append(copy.deepcopy(single))
        run.shard(models[1], torch_fully_shard)
    is_pending = False  # gradients are there that have not been reduced
    for number, step in enumerate(run.steps):
        if not is_pending:
            for model in (*models, single):
                zero(model, step.zero)
        backward(models, single, step, make_rows(number, per_rank=2, width=run.width))
        is_pending = not step.is_synced
        if step.is_synced:
            for model in models:
                check(model, single)


def backward(models: list[Any], single: nn.Module, step: Step, rows: torch.Tensor) -> None:
    ranks = range(dist.get_world_size())
    torch.stack([loss_of(single, rows_of(rows, rank), step, rank) for rank in ranks]).mean().backward()
    for model in models:
        model.set_requires_gradient_sync(step.is_synced)
        loss_of(model, rows_of(rows, dist.get_rank()), step, dist.get_rank()).backward()


def check(sharded: nn.Module, single: nn.Module) -> None:
    right = dict(single.named_parameters())
    for name, param in sharded.named_parameters():
        grad, wanted = param.grad, right[name].grad
        assert (grad is None) == (wanted is None), f"{name}: {describe(grad)}, not {describe(wanted)}"
        if grad is not None and wanted is not None:
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            floor = FLOORS[wanted.dtype] / largest if largest else 0.0
            assert_is_shard(grad, wanted, name, TOLERANCES[wanted.dtype] + floor)


@pytest.mark.threads
@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(runs())
def test_gradients_are_those_of_a_single_process(run: Run) -> None:
    with warnings.catch_warnings():
        # Said of layers without elements, as they are initialised; and by torch of modules like ours.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
        warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
        weft.launch(train, args=(run,), ranks=run.ranks, kind="thread", timeout=60, collective_timeout=10)
