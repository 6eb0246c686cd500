"""Two data-parallel modules in one backward: the mean, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.errors import WeftError
from weft.testing import on_ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.skips_a = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.b(rows if self.skips_a else self.a(rows))


def my_rows() -> torch.Tensor:
    return torch.full((2, 3), dist.get_rank() + 1.0)


Loss = Callable[[list[nn.Module]], torch.Tensor]


def check_mean(models: list[nn.Module], bare: list[nn.Module], loss: Loss, num_steps: int = 3) -> None:
    """Gradients are the mean in every step, or weft refuses."""
    for _ in range(num_steps):
        for model in models:
            model.zero_grad()
        loss(models).backward()
        singles = copy.deepcopy(bare)
        for single in singles:
            single.zero_grad()
        loss(singles).backward()
        for mine, right in zip(bare, singles, strict=True):
            for param, alone in zip(mine.parameters(), right.parameters(), strict=True):
                mean = torch.zeros_like(param) if alone.grad is None else alone.grad.clone()
                dist.all_reduce(mean)
                torch.testing.assert_close(param.grad, mean / dist.get_world_size())


@on_ranks(2)
def test_ddp_inside_ddp_has_the_mean_or_is_refused() -> None:
    module, rows = Two(), my_rows()
    try:
        model = DistributedDataParallel(DistributedDataParallel(module))
        check_mean([model], [module], lambda models: models[0](rows).sum())
    except WeftError as error:
        if "weight" not in str(error):
            raise


@on_ranks(2)
def test_a_module_wrapped_twice_has_the_mean_or_is_refused() -> None:
    module, rows = Two(), my_rows()
    first = DistributedDataParallel(module)
    try:
        second = DistributedDataParallel(module)
        check_mean([second], [module], lambda models: models[0](rows).sum())
    except WeftError as error:
        if "weight" not in str(error):
            raise
    del first


@on_ranks(2)
def test_modules_that_share_a_layer_have_the_mean_or_are_refused() -> None:
    modules, rows = [Two(), Two()], my_rows()
    modules[1].a = modules[0].a
    try:
        models = [DistributedDataParallel(module) for module in modules]
        check_mean(list(models), list(modules), lambda models: models[0](rows).sum() + models[1](rows).sum())
    except WeftError as error:
        if "weight" not in str(error):
            raise


def assert_mean_or_refused(loss: Loss, modules: list[Two]) -> None:
    models = [DistributedDataParallel(module) for module in modules]
    try:
        check_mean(list(models), list(modules), loss)
    except WeftError:
        return


@on_ranks(2)
def test_like_modules_that_ranks_use_in_different_order_do_not_mix() -> None:
    rows = my_rows()

    def loss(models: list[nn.Module]) -> torch.Tensor:
        order = (0, 1) if dist.get_rank() == 0 else (1, 0)
        outputs = {index: models[index](rows).sum() * (index + 1) for index in order}
        return outputs[0] + outputs[1]

    assert_mean_or_refused(loss, [Two(), Two()])


@pytest.mark.parametrize("cap", [0, 25])
@on_ranks(2)
def test_like_modules_of_which_one_has_unused_parameters_on_a_rank_do_not_mix(cap: float) -> None:
    rows = my_rows()
    modules = [Two(), Two()]
    models = [DistributedDataParallel(module, bucket_cap_mb=cap) for module in modules]
    for step in range(4):
        modules[0].skips_a = step >= 2 and dist.get_rank() == 1
        try:
            check_mean(
                list(models),
                list(modules),
                lambda models: models[1](rows).sum() * 2 + models[0](rows).sum(),
                num_steps=1,
            )
        except WeftError:
            return
