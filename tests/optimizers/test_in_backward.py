"""Optimizers that step inside backward, with gradient hooks and without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.comm_hooks.ddp_zero_hook import hook_with_zero_step
from weft.comm_hooks.default_hooks import allreduce_hook
from weft.comm_hooks.optimizer_overlap_hooks import (
    PerParameterOptimizer,
    _apply_optim_in_backward_hook,
    _hook_then_optimizer,
    _OptimizerHookState,
)
from weft.optimizers import (
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)
from weft.testing.models import MLP, TiedMLP, make_batches

pytestmark = run_on(threads=2)

ADAM: Any = {"lr": 0.02}


def run_plain(model: nn.Module, optimizers: list[torch.optim.Optimizer], num_steps: int = 4) -> None:
    for batch in make_batches(MLP(), num_steps):
        model(batch.shard().inputs).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    for param, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("make", [MLP, TiedMLP])
@run_on(threads=1)
def test_steps_when_a_gradient_is_there(make: type[nn.Module]) -> None:
    model, plain = make(), make()
    apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), ADAM)
    run_plain(plain, [torch.optim.Adam(plain.parameters(), **ADAM)])
    run_plain(model, [])
    assert_equal_models(model, plain)
    assert all(param.grad is None for param in model.parameters())


@run_on(threads=1)
def test_several_optimizers_for_a_parameter() -> None:
    model, plain = MLP(), MLP()
    for lr in (0.03, 0.01):
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": lr})
    run_plain(plain, [torch.optim.SGD(plain.parameters(), lr=lr) for lr in (0.03, 0.01)])
    run_plain(model, [])
    assert_equal_models(model, plain)
    assert len(get_in_backward_optimizers(model)) == 2 * len(list(model.parameters()))


@run_on(threads=1)
def test_without_a_hook_nothing_steps() -> None:
    model = MLP()
    before = copy.deepcopy(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    run_plain(model, [], num_steps=1)
    assert_equal_models(model, before)
    assert all(param.grad is not None for param in model.parameters())


def test_data_parallel_steps_after_the_reduction() -> None:
    model, plain = MLP(), MLP()
    apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), ADAM)
    run_plain(DistributedDataParallel(model, bucket_cap_mb=0.0001), [])
    wrapped = DistributedDataParallel(plain, bucket_cap_mb=0.0001)
    run_plain(wrapped, [torch.optim.Adam(plain.parameters(), **ADAM)])
    assert_equal_models(model, plain)


def test_a_functional_optimizer_behind_a_hook() -> None:
    model, plain = (DistributedDataParallel(MLP(), bucket_cap_mb=0.0001) for _ in range(2))
    functional = PerParameterOptimizer(torch.optim.Adam, **ADAM)
    model.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, _OptimizerHookState(functional)))
    for batch in make_batches(MLP(), 4):
        model.zero_grad()
        model(batch.shard().inputs).pow(2).mean().backward()
    run_plain(plain, [torch.optim.Adam(plain.parameters(), **ADAM)])
    assert_equal_models(model, plain)
    assert set(functional.optimizers) == set(model.parameters())


def test_a_functional_optimizer_for_some_parameters() -> None:
    model = DistributedDataParallel(MLP())
    before = copy.deepcopy(model.module)
    first = next(model.parameters())
    state = _OptimizerHookState(PerParameterOptimizer(torch.optim.SGD, lr=0.1), [first])
    model.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, state))
    run_plain(model, [], num_steps=1)
    changed = [
        not torch.equal(param, other)
        for param, other in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert changed == [True] + [False] * (len(changed) - 1)


@run_on()
def test_a_functional_optimizer_is_checked() -> None:
    with pytest.raises(ValueError, match="must implement method step_param"):
        _OptimizerHookState(object())


def test_carried_optimizers_behind_a_hook() -> None:
    """The hook by itself, on a bucket made by hand."""
    from weft.comm_hooks import GradBucket

    param, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 1.0}, register_hook=False)
    buffer = torch.full((5,), float(dist.get_rank()))
    hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=False)
    result = hook(dist.group.WORLD, GradBucket(0, buffer, [param, other], is_last=True)).wait()
    assert result.tolist() == [0.5] * 5
    assert param.tolist() == [-0.5, -0.5]
    assert other.tolist() == [0.0] * 3


def test_overlapping_is_checked() -> None:
    model = DistributedDataParallel(MLP())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="must be constructed with `overlap_with_ddp=True`"):
        hook_with_zero_step(allreduce_hook, model, zero)
    overlapping = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    for call in (
        overlapping.state_dict,
        overlapping.consolidate_state_dict,
        lambda: overlapping.load_state_dict({}),
    ):
        with pytest.raises(
            RuntimeError, match="should not be called until this ZeroRedundancyOptimizer instance"
        ):
            call()


def test_the_state_of_overlapping_steps() -> None:
    model, plain = (DistributedDataParallel(MLP(), bucket_cap_mb=0.0001) for _ in range(2))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, **ADAM)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, zero))
    optimizer = torch.optim.Adam(plain.parameters(), **ADAM)
    run_plain(model, [zero])
    run_plain(plain, [optimizer])
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        found, expected = zero.state_dict()["state"], optimizer.state_dict()["state"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[index]["exp_avg"], expected[index]["exp_avg"]) for index in expected)
