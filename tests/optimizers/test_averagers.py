"""Model averagers and the optimizer that uses them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.ranks import run_on
from weft.optimizers import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
    get_params_to_average,
)

pytestmark = run_on(threads=2)


def make_model(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            param.grad = torch.ones_like(param)
    return model


def value_of(model: nn.Module) -> float:
    (value,) = {param.unique().item() for param in model.parameters()}
    return value


@run_on(threads=4)
def test_the_mean_is_taken_in_place_and_in_one_message_a_dtype() -> None:
    rank = dist.get_rank()
    params = [
        torch.full((3, 2), float(rank)),
        torch.full((5,), rank, dtype=torch.float64),
        torch.full((2,), float(rank)),
    ]
    memory = [param.data_ptr() for param in params]
    with weft.record() as events:
        average_parameters(params)
    assert [param.unique().item() for param in params] == [1.5] * 3
    assert [param.data_ptr() for param in params] == memory
    assert [event.op for event in events] == ["all_reduce"] * 2


@run_on(threads=4)
def test_every_period_after_warmup() -> None:
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    model = make_model(0.0)
    averaged = []
    for step in range(10):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float(dist.get_rank()))
        averager.average_parameters(model.parameters())
        if value_of(model) == 1.5:
            averaged.append(step)
    assert averaged == [2, 5, 8]
    assert averager.step == 10


@run_on(threads=4)
def test_small_groups_often_and_large_ones_seldom() -> None:
    averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=2)
    rank = dist.get_rank()
    seen = []
    for _ in range(9):
        model = make_model(float(rank))
        averager.average_parameters([{"params": list(model.parameters())}])
        seen.append(value_of(model))
    pair = 0.5 if rank < 2 else 2.5
    own = float(rank)
    assert seen == [own, own, pair, own, 1.5, own, pair, own, 1.5]


@run_on(threads=1)
def test_only_parameters_with_gradients() -> None:
    model = make_model(1.0)
    model.bias.grad = None
    assert get_params_to_average(model.parameters()) == [model.weight]
    assert get_params_to_average([{"params": [model.bias, model.weight]}]) == [model.weight]
    with pytest.raises(NotImplementedError, match="Parameter input of type <class 'int'> is not supported"):
        get_params_to_average([3])  # type: ignore[list-item]


def test_outsiders_do_nothing() -> None:
    only_first: Any = dist.new_group([0])
    param = torch.ones(1)
    average_parameters([param], only_first)
    assert param.item() == 1.0


@pytest.mark.filterwarnings("ignore:When period is 1")
@run_on(threads=1)
def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="``period`` must be a positive value"):
        PeriodicModelAverager(period=0)
    with pytest.raises(ValueError, match="``warmup_steps`` must be a non-negative number"):
        PeriodicModelAverager(period=2, warmup_steps=-1)
    with pytest.raises(ValueError, match="must not be empty"):
        HierarchicalModelAverager({})
    with pytest.raises(ValueError, match="must be a positive value"):
        HierarchicalModelAverager({0: 1, 2: 1})
    with pytest.raises(
        ValueError, match=r"period_group_size_dict`` 2 must be equal to the size of arg ``process_group`` 1"
    ):
        HierarchicalModelAverager({2: 2})


@run_on()
@pytest.mark.threads
def test_a_period_of_one_is_pointless() -> None:
    def body() -> None:
        PeriodicModelAverager(period=1)

    with pytest.warns(UserWarning, match="only DistributedDataParallel should be used"):
        weft.launch(body, ranks=1, kind="thread")


def test_post_local_sgd() -> None:
    model = make_model(float(dist.get_rank()))
    local = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2, warmup_steps=1))
    optimizer.step()
    assert value_of(model) == dist.get_rank() - 0.5
    optimizer.step()  # 1.9 in the momentum buffer
    assert value_of(model) == pytest.approx(0.5 - 0.5 - 0.95)
    assert optimizer.state is local.state
    assert optimizer.param_groups is local.param_groups
    optimizer.zero_grad()
    assert model.weight.grad is None

    saved = optimizer.state_dict()
    assert saved["step"] == 2
    again = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=9.0), PeriodicModelAverager(period=2)
    )
    again.load_state_dict(saved)
    assert again.averager.step == 2
    assert again.param_groups[0]["lr"] == 0.5
    assert again.param_groups is again.optim.param_groups


@run_on()
@pytest.mark.threads
def test_a_state_without_a_count_warns() -> None:
    def body() -> None:
        model = make_model(0.0)
        local = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2))
        optimizer.averager.step = 5
        optimizer.load_state_dict(local.state_dict())
        assert optimizer.averager.step == 0

    with pytest.warns(UserWarning, match="does not contain a step counter"):
        weft.launch(body, ranks=1, kind="thread")
