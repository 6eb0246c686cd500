"""Two data-parallel strategies around each other or side by side, weft's and torch's: right, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from tests.data_parallel.cases import cases
from tests.data_parallel.strategies import ALL, WEFT, assert_right, net, rows
from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.errors import UnfitError, WeftError

pytestmark = run_on(threads=2)


def apply(inner: str, outer: str, *, to_child: bool) -> nn.Module:
    model = net()
    if to_child:
        model[0] = ALL[inner](model[0])
        return ALL[outer](model)
    return ALL[outer](ALL[inner](model))


@pytest.mark.parametrize(
    ("outer", "to_child"),
    cases(list(ALL), [False, True], everyday=lambda outer, to_child: outer in WEFT or not to_child),
)
def test_gradients_are_right_or_refused(outer: str, to_child: bool) -> None:
    """torch refuses, too, what weft holds; its errors name no module of weft's."""
    for inner in ALL if outer in WEFT else WEFT:
        if outer == "torch's replicate" and inner == "DistributedDataParallel":
            continue  # found by what torch keeps for the whole process, which threads share
        try:
            assert_right(apply(inner, outer, to_child=to_child))
        except WeftError:
            pass
        except AssertionError as error:
            assert "distributed API" in str(error), f"{outer} around {inner}: {error}"  # noqa: PT017
        except RuntimeError as error:
            assert "already managed by" in str(error), f"{outer} around {inner}: {error}"  # noqa: PT017


@pytest.mark.parametrize("inner", WEFT)
def test_the_wrapper_of_torch_around_weft_names_both(inner: str) -> None:
    with pytest.raises(UnfitError, match=rf"torch's DistributedDataParallel .*weft's {inner} holds"):
        apply(inner, "torch's DistributedDataParallel", to_child=False)
    with pytest.raises(UnfitError, match=rf"put around '0' .*weft's {inner} holds"):
        apply(inner, "torch's DistributedDataParallel", to_child=True)


def test_the_wrapper_of_torch_may_leave_alone_what_weft_holds() -> None:
    model = net()
    weft.replicate(model[0])
    TorchDDP._set_params_and_buffers_to_ignore_for_model(
        model, [f"0.{name}" for name, _ in model[0].named_parameters()]
    )
    assert_right(TorchDDP(model))


def test_the_wrapper_of_torch_may_hold_what_weft_has_frozen() -> None:
    model = net()
    weft.replicate(model[0])
    model[0].requires_grad_(False)
    TorchDDP(model)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("torch's DistributedDataParallel", "DistributedDataParallel"),
        ("torch's DistributedDataParallel", "replicate"),
        ("torch's replicate", "DistributedDataParallel"),
    ],
)
@run_on(threads=1)  # torch keeps the wrapper that runs for the whole process, which threads share
def test_weft_inside_a_wrapper_that_was_there_first_is_refused_in_forward(outer: str, inner: str) -> None:
    model = net()
    wrapped = ALL[outer](model)
    model[0] = WEFT[inner](model[0])
    with pytest.raises(WeftError, match=r"torch's DistributedDataParallel.*Use one of the two"):
        wrapped(rows(dist.get_rank()))


@pytest.mark.parametrize("outer", ["replicate", "fully_shard", "replicate_with_fsdp"])
@pytest.mark.parametrize("inner", ["DistributedDataParallel", "torch's DistributedDataParallel"])
def test_what_needs_no_wrapper_leaves_wrapped_children_to_their_wrapper(outer: str, inner: str) -> None:
    model = apply(inner, outer, to_child=True)
    child = model.get_submodule("0.module.0")
    assert type(child.weight) is nn.Parameter
    assert_right(model)


def test_sharding_an_outer_module_before_an_inner_one_is_refused() -> None:
    model = net()
    weft.fully_shard(model)
    with pytest.raises(UnfitError, match=r"'0\.weight' is a DTensor .*inner modules first"):
        weft.fully_shard(model[0])
    assert_right(model)


@run_on(threads=1)
def test_sharding_an_outer_module_first_is_refused_on_a_single_rank() -> None:
    model = net()
    weft.fully_shard(model)
    with pytest.raises(UnfitError, match="inner modules first"):
        weft.fully_shard(model[0])


# -- two wrappers at work in one backward ------------------------------------------------------


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


def test_ddp_inside_ddp_has_the_mean_or_is_refused() -> None:
    module, rows = Two(), my_rows()
    try:
        model = DistributedDataParallel(DistributedDataParallel(module))
        check_mean([model], [module], lambda models: models[0](rows).sum())
    except WeftError as error:
        if "weight" not in str(error):
            raise


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


def test_like_modules_that_ranks_use_in_different_order_do_not_mix() -> None:
    rows = my_rows()

    def loss(models: list[nn.Module]) -> torch.Tensor:
        order = (0, 1) if dist.get_rank() == 0 else (1, 0)
        outputs = {index: models[index](rows).sum() * (index + 1) for index in order}
        return outputs[0] + outputs[1]

    assert_mean_or_refused(loss, [Two(), Two()])


@pytest.mark.parametrize("cap", [0, 25])
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
