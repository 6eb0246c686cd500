"""Programs that know torch's classes know weft's modules by them, and run nothing of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from tests.data_parallel.strategies import WEFT, full, loss, net, right_gradients, rows
from tests.ranks import run_on
from weft.fsdp import replicate_with_fsdp
from weft.modules.nominal import sharded_base

pytestmark = run_on(threads=2)

SHARDED: list[Callable[..., Any]] = [weft.fully_shard, replicate_with_fsdp]


@run_on(threads=1)
def test_the_wrapper_is_torchs_to_isinstance() -> None:
    model = weft.DistributedDataParallel(net())
    assert isinstance(model, TorchDDP)
    assert not isinstance(weft.replicate(net()), TorchDDP)
    assert not isinstance(model, TorchFSDPModule)


@run_on(threads=1)
def test_nothing_of_torchs_wrapper_is_inherited() -> None:
    assert TorchDDP not in weft.DistributedDataParallel.__mro__
    assert all("torch.nn.parallel" not in cls.__module__ for cls in weft.DistributedDataParallel.__mro__)


@pytest.mark.parametrize("shard", SHARDED)
@run_on(threads=1)
def test_a_sharded_module_is_torchs_to_isinstance(shard: Callable[..., Any]) -> None:
    model: Any = shard(net())
    assert not isinstance(model[0], TorchFSDPModule)
    assert isinstance(model, TorchFSDPModule)
    assert isinstance(model, weft.FSDPModule)


@pytest.mark.parametrize("shard", SHARDED)
@run_on(threads=1)
def test_nothing_of_torchs_sharded_module_is_reached(shard: Callable[..., Any]) -> None:
    """Each attribute is weft's, or nn.Module's, or isn't there."""
    model = shard(net())
    everyones = set(vars(type("Empty", (), {})))
    for name in set(vars(TorchFSDPModule)) - everyones:
        owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
        assert owner.__module__.startswith("weft."), name
        if owner is sharded_base():
            assert not hasattr(model, name)
            assert not hasattr(type(model), name)


@run_on(threads=1)
def test_what_torch_may_add_to_its_class_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchFSDPModule, "set_something_new", lambda self: 1, raising=False)
    sharded_base.cache_clear()
    try:
        assert not hasattr(weft.fully_shard(net()), "set_something_new")
    finally:
        sharded_base.cache_clear()


@run_on(threads=1)
def test_weft_may_be_put_in_the_place_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", weft.FSDPModule)
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", weft.fully_shard)
    sharded_base.cache_clear()
    try:
        assert not isinstance(weft.fully_shard(net()), TorchFSDPModule)
    finally:
        sharded_base.cache_clear()


@pytest.mark.parametrize("strategy", WEFT)
def test_names_in_torchs_state_dicts_are_the_modules_own(strategy: str) -> None:
    model = WEFT[strategy](net())
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, dist.get_rank()).backward()
    optimizer.step()
    names = [name for name, _ in net().named_parameters()]
    state, optimizer_state = get_state_dict(model, optimizer)
    assert list(state) == names
    assert sorted(optimizer_state["state"]) == sorted(names)
    right = {name: full(value).clone() for name, value in state.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = {name: torch.zeros_like(value).add_(1) for name, value in state.items()}
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert all(bool((full(param) == 1).all()) for param in model.parameters())
    assert set(right) == set(names)


def test_a_full_state_dict_goes_into_another_strategy() -> None:
    sharded = weft.fully_shard(net())
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    bare = net()
    with torch.no_grad():
        for param in bare.parameters():
            param.zero_()
    if dist.get_rank() == 0:  # the only one that gets it
        bare.load_state_dict(state)
        for param, right in zip(bare.parameters(), net().parameters(), strict=True):
            assert torch.equal(param, right)


def test_a_replicated_module_keeps_the_name_of_its_class() -> None:
    model = weft.replicate(net())
    assert type(model).__name__ == "Sequential"
    assert type(model) is not nn.Sequential


@pytest.mark.parametrize("strategy", WEFT)
@run_on(threads=1)
def test_it_bears_the_mark_of_what_is_prepared(strategy: str) -> None:
    assert WEFT[strategy](net())._is_accelerate_prepared is True


def test_a_reduction_may_be_asked_for_when_forward_was_told_not_to() -> None:
    """As torch's pipelines and Accelerate's trigger_sync_in_backward do."""
    model = weft.DistributedDataParallel(net())
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            first, second = loss(model, rank), loss(model, rank)
        first.backward()
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        with weft.record() as events:
            second.backward()
        assert any("reduce" in event.op for event in events)
        for param, right in zip(model.parameters(), right_gradients(), strict=True):
            torch.testing.assert_close(param.grad, 2 * right, rtol=1e-10, atol=1e-12)
        with model.no_sync():
            local = loss(model, rank)
        with weft.record() as events:
            local.backward()
        assert not any("reduce" in event.op for event in events)


@pytest.mark.parametrize("strategy", ["DistributedDataParallel", "fully_shard"])
def test_a_pipeline_of_torchs_reduces_once_behind_the_last_microbatch(strategy: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([member]) for member in range(size)]
    model = WEFT[strategy](net())
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[rank])
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: (output - target).square().sum())
    for _ in range(2):
        model.zero_grad()
        with weft.record() as events:
            schedule.step(rows(rank), target=torch.zeros(4, 4, dtype=torch.float64))
        assert sum("reduce" in event.op for event in events) <= 2  # one, and what it is made of
        for param, right in zip(model.parameters(), right_gradients(), strict=True):
            torch.testing.assert_close(full(param.grad), right / 2, rtol=1e-10, atol=1e-12)
