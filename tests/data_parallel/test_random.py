"""Random models and runs: DDP's gradients are those of a single process on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch import nn

import weft
from tests.data_parallel.hooks import mean_hook
from tests.data_parallel.libraries import DistributedDataParallel
from tests.data_parallel.random_models import Drawn, Run, Step, runs
from tests.data_parallel.twins import assert_same_gradient, gradients_of, make_rows, rows_of

# Sums over ranks are taken in another order than sums over rows, where terms may cancel.
TOLERANCES = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5}
FLOOR = {torch.float64: 1e-15, torch.complex128: 1e-15, torch.float32: 1e-7}


def loss_of(model: nn.Module, rows: torch.Tensor, program: tuple[int, ...]) -> torch.Tensor:
    # A program may be empty: the input needs a gradient, so that there is a backward to take part in.
    return model(rows.clone().requires_grad_(), program).square().mean()


def zero(model: nn.Module, how: str) -> None:
    if how != "keep":
        model.zero_grad(set_to_none=how == "none")


def train(run: Run) -> None:
    model = Drawn(run)
    if not any(param.requires_grad for param in model.parameters()):
        return
    single = copy.deepcopy(model)
    parallel = DistributedDataParallel(model, **run.options)
    if run.has_hook:
        parallel.register_comm_hook(None, mean_hook)
    is_pending = False  # gradients are there that have not been reduced
    for number, step in enumerate(run.steps):
        if not is_pending:
            zero(parallel, step.zero)
            zero(single, step.zero)
        backward(parallel, single, step, make_rows(number, per_rank=2, width=run.width))
        is_pending = not step.is_synced
        if step.is_synced:
            check(parallel, single)


def backward(parallel: Any, single: nn.Module, step: Step, rows: torch.Tensor) -> None:
    ranks = range(dist.get_world_size())
    torch.stack([loss_of(single, rows_of(rows, r), step.programs[r]) for r in ranks]).mean().backward()
    rank = dist.get_rank()
    with contextlib.nullcontext() if step.is_synced else parallel.no_sync():
        loss_of(parallel, rows_of(rows, rank), step.programs[rank]).backward()


def check(parallel: nn.Module, single: nn.Module) -> None:
    right = gradients_of(single)
    for name, grad in gradients_of(parallel).items():
        wanted = right[name]
        if grad is not None and wanted is not None and wanted.numel():
            dtype = grad.dtype
            largest = wanted.abs().max().item()
            tolerance = TOLERANCES[dtype] + (FLOOR[dtype] / largest if largest else 0.0)
            assert_same_gradient(grad, wanted, name, tolerance)
        else:
            assert_same_gradient(grad, wanted, name)


@pytest.mark.threads
@pytest.mark.parametrize("num_examples", [12, pytest.param(150, marks=pytest.mark.full)])
def test_gradients_are_those_of_a_single_process(num_examples: int) -> None:
    def check_run(run: Run) -> None:
        with warnings.catch_warnings():
            # Said of layers without elements, as they are initialised.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
            weft.launch(train, args=(run,), ranks=run.ranks, kind="thread", timeout=60, collective_timeout=10)

    how = settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    how(given(runs())(check_run))()
