"""Gradients whose memory the user has exchanged or kept still become the mean."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.testing import on_ranks


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def right_gradients(model: DistributedDataParallel, rows: torch.Tensor) -> list[torch.Tensor]:
    single = copy.deepcopy(model.module)
    single.zero_grad()
    single(rows).sum().backward()
    return [mean_over_ranks(param.grad) for param in single.parameters()]


def assert_right(model: DistributedDataParallel, rows: torch.Tensor) -> None:
    for param, right in zip(model.parameters(), right_gradients(model, rows), strict=True):
        torch.testing.assert_close(param.grad, right, rtol=1e-5, atol=1e-5, check_stride=False)


def warmed_up(module: nn.Module, rows: torch.Tensor, **options: object) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **options)
    for _ in range(2):
        model.zero_grad()
        model(rows).sum().backward()
    return model


def two_layers(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def my_rows(width: int = 3) -> torch.Tensor:
    return torch.full((2, width), dist.get_rank() + 1.0)


@pytest.mark.parametrize("width", [3, 200])
@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_a_step_after_grad_data_was_assigned_has_the_mean(width: int, view: bool) -> None:
    rows = my_rows(width)
    model = warmed_up(two_layers(width), rows, gradient_as_bucket_view=view)
    for param in model.parameters():
        param.grad.data = param.grad.data * 0.5
    for scale in (3.0, 4.0):
        model.zero_grad()
        model(rows * scale).sum().backward()
        assert_right(model, rows * scale)


@on_ranks(2)
def test_gradients_add_up_onto_data_that_was_assigned() -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    for param in model.parameters():
        param.grad.data = torch.zeros_like(param)
    model(rows * 3).sum().backward()
    assert_right(model, rows * 3)


@on_ranks(2)
def test_a_change_of_memory_format_after_wrapping_leaves_the_mean() -> None:
    rows = torch.full((2, 3, 5, 5), dist.get_rank() + 1.0)
    model = warmed_up(nn.Conv2d(3, 4, 3), rows)
    model.to(memory_format=torch.channels_last)
    model.zero_grad()
    model(rows * 3).sum().backward()
    assert_right(model, rows * 3)


@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_a_change_of_dtype_after_wrapping_is_an_error_or_right(set_to_none: bool) -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    model.double()
    model.zero_grad(set_to_none=set_to_none)
    try:
        model(rows.double() * 3).sum().backward()
    except RuntimeError as error:
        if "weight" not in str(error) and "bias" not in str(error):
            raise
        return
    assert_right(model, rows.double() * 3)


@on_ranks(2)
def test_a_kept_gradient_stays_while_others_add_up() -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    weight = model.module[0].weight
    kept = weight.grad
    before = kept.clone()
    weight.grad = None
    model(rows * 3).sum().backward()
    assert torch.equal(kept, before)


def user_made(model: DistributedDataParallel, rows: torch.Tensor) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def accumulated(model: DistributedDataParallel, rows: torch.Tensor) -> None:
    with model.no_sync():
        (model(rows).sum() * 0).backward()


@pytest.mark.filterwarnings("ignore:Using backward")  # of a cycle between parameter and gradient
@pytest.mark.parametrize("prepare", [user_made, accumulated])
@on_ranks(2)
def test_create_graph_on_top_of_gradients_gives_the_mean(prepare: Callable[..., None]) -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    model.zero_grad()
    prepare(model, rows)
    model(rows).sum().backward(create_graph=True)
    assert_right(model, rows)
    model.zero_grad()
