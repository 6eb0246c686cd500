"""Random chains of layers with random plans: a single process's outputs and gradients, and torch's too."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_tp
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import weft
import weft.tensor_parallel as weft_tp
from tests.tensor_parallel.random_plans import Chain, chains
from tests.tensor_parallel.twins import (
    LAYOUTS,
    dtensor_input,
    dual_of,
    full_of,
    local_input,
    local_of,
    make_mesh,
    normal,
    numbers,
    part_of,
    pull_back,
    whole_of,
)

# Sums over ranks are taken in another order than sums over features, where terms may cancel.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def check(seen: torch.Tensor, right: torch.Tensor, name: str, scale: float) -> None:
    assert seen.shape == right.shape, f"{name}: {list(seen.shape)}, not {list(right.shape)}"
    assert seen.dtype == right.dtype, f"{name}: {seen.dtype}, not {right.dtype}"
    if right.numel() == 0:
        return
    apart = (seen.double() - right.double()).abs().max().item()
    allowed = TOLERANCES[right.dtype] * max(right.abs().max().item(), scale)
    assert math.isfinite(apart), name
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed"


def run(chain: Chain, model: nn.Module, single: nn.Module, mesh: DeviceMesh, step: int) -> None:
    """One forward and backward of each; outputs and the input's gradient are compared."""
    full = chain.inputs(step)
    start, last = LAYOUTS[chain.start], chain.layers[-1]
    make_input = dtensor_input if chain.has_dtensor_input else local_input
    mine = make_input(full, start, mesh)
    whole = full.clone().requires_grad_(full.is_floating_point())
    right, seen = single(whole), model(mine)
    layout = LAYOUTS[last.output]
    assert isinstance(seen, DTensor) != last.is_local
    if isinstance(seen, DTensor):
        assert seen.placements == (normal(layout, right.dim()),)
    check(whole_of(local_of(seen), layout, mesh), right.detach(), "output", 1.0)
    if not right.requires_grad:
        assert not seen.requires_grad
        return
    cotangent = numbers(*right.shape, seed=7, dtype=right.dtype)
    right.backward(cotangent)
    pull_back(seen, cotangent, layout, mesh)
    if whole.grad is not None:
        if isinstance(mine, DTensor):
            check(full_of(mine.grad), whole.grad, "gradient of the input", 1.0)
        else:
            check(mine.grad, part_of(whole.grad, dual_of(start), mesh), "gradient of the input", 1.0)


def train(tp: Any, chain: Chain) -> None:
    """Gradients of all steps add up."""
    mesh = make_mesh()
    single = chain.model()
    model = copy.deepcopy(single)
    tp.parallelize_module(model, mesh, chain.plan(tp))
    for step in range(chain.steps):
        run(chain, model, single, mesh, step)
    wanted = dict(single.named_parameters())
    largest = max(
        [1.0, *(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None and p.numel())]
    )
    for name, param in model.named_parameters():
        right = wanted[name].grad
        assert param.requires_grad == wanted[name].requires_grad, name
        assert (param.grad is None) == (right is None), f"{name}: has a gradient, or lacks one"
        if right is not None:
            check(full_of(param.grad), right, name, largest)


@pytest.mark.threads
@pytest.mark.parametrize("num_examples", [8, pytest.param(80, marks=pytest.mark.full)])
def test_outputs_and_gradients_are_those_of_a_single_process(num_examples: int) -> None:
    def check_chain(chain: Chain) -> None:
        for tp in (weft_tp, torch_tp) if chain.fits_torch else (weft_tp,):
            weft.launch(
                train, args=(tp, chain), ranks=chain.ranks, kind="thread", timeout=60, collective_timeout=20
            )

    how = settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    how(given(chains())(check_chain))()
