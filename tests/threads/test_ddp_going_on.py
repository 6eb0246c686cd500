"""A run goes on after what is allowed, or after an error that every rank had."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import weft
from weft import DistributedDataParallel
from weft.errors import WeftError
from weft.testing import on_ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(rows))


def my_rows() -> torch.Tensor:
    return torch.full((2, 3), dist.get_rank() + 1.0)


def warmed_up(**options: object) -> DistributedDataParallel:
    model = DistributedDataParallel(Two(), **options)
    for _ in range(2):
        run_step(model)
    return model


def run_step(model: DistributedDataParallel) -> None:
    model.zero_grad()
    model(my_rows()).sum().backward()


def assert_right(model: DistributedDataParallel) -> None:
    single = copy.deepcopy(model.module)
    single.zero_grad()
    single(my_rows()).sum().backward()
    for param, alone in zip(model.parameters(), single.parameters(), strict=True):
        mean = alone.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(param.grad, mean / dist.get_world_size())


@on_ranks(2)
def test_training_goes_on_while_the_error_of_a_failed_step_is_kept() -> None:
    fails = [False]

    def hook(state: object, bucket: weft.GradBucket):
        if fails[0]:
            future: Future[torch.Tensor] = Future()
            future.set_exception(ValueError("a hook's"))
            return future
        return weft.comm.all_reduce(bucket.buffer().div_(2)).future()

    model = DistributedDataParallel(Two())
    model.register_comm_hook(None, hook)
    run_step(model)
    fails[0] = True
    with pytest.raises(ValueError, match="a hook's") as kept:
        run_step(model)
    fails[0] = False
    run_step(model)
    assert_right(model)
    assert kept.value


@on_ranks(2)
def test_autograd_grad_on_one_rank_alone_leaves_ranks_in_step() -> None:
    model = warmed_up()
    if dist.get_rank() == 0:
        rows = my_rows().requires_grad_()
        torch.autograd.grad(model(rows).sum(), rows)
    run_step(model)
    assert_right(model)


@pytest.mark.parametrize("num_before", [0, 2])
@on_ranks(2)
def test_a_parameter_may_be_frozen_after_wrapping(num_before: int) -> None:
    model = DistributedDataParallel(Two())
    for _ in range(num_before):
        run_step(model)
    model.module.a.weight.requires_grad_(False)
    for _ in range(3):
        run_step(model)
    assert model.module.a.weight.grad is None
    model.module.a.weight.requires_grad_(True)
    run_step(model)
    assert_right(model)


@on_ranks(2)
def test_all_parameters_may_be_frozen_for_a_backward_to_the_inputs() -> None:
    model = warmed_up()
    for _ in range(3):
        model.requires_grad_(False)
        rows = my_rows().requires_grad_()
        model(rows).sum().backward()
        assert rows.grad is not None
        model.requires_grad_(True)
        run_step(model)
        assert_right(model)


@on_ranks(2)
def test_ranks_with_different_histories_go_on_in_one_group() -> None:
    model = warmed_up()
    world, alone = model.process_group, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model._update_process_group(alone)
    for _ in range(1 + dist.get_rank()):
        run_step(model)
    model._update_process_group(world)
    run_step(model)
    assert_right(model)


@on_ranks(2)
def test_a_copy_is_in_the_group_that_its_model_is_in_now() -> None:
    model = warmed_up()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model._update_process_group(alone)
    assert copy.deepcopy(model).process_group is alone


@pytest.mark.parametrize("at", ["a", "b"])
@on_ranks(2)
def test_a_tied_weight_that_was_untied_is_reduced_or_refused(at: str) -> None:
    module = Two()
    module.b.weight = module.a.weight
    model = DistributedDataParallel(module)
    for _ in range(2):
        run_step(model)
    getattr(module, at).weight = nn.Parameter(module.a.weight.detach().clone())
    try:
        run_step(model)
    except WeftError as error:
        if "weight" not in str(error):
            raise
        return
    assert_right(model)


@pytest.mark.parametrize("numel", [0, 1, 5])
@on_ranks(2)
def test_a_gradient_hooks_result_of_a_wrong_size_is_an_error(numel: int) -> None:
    def hook(state: object, bucket: weft.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer()[:numel])
        return future

    model = DistributedDataParallel(Two())
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="18"):
        run_step(model)


@on_ranks(2)
def test_a_bucket_may_be_without_limit() -> None:
    model = DistributedDataParallel(Two(), bucket_cap_mb=float("inf"))
    run_step(model)
    assert_right(model)


@on_ranks(2)
def test_a_delayed_parameter_that_is_not_there_is_an_error() -> None:
    module = Two()
    with pytest.raises(ValueError, match="nope"):
        DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[("nope", module.a.weight)],
            param_to_hook_all_reduce=module.b.weight,
        )


@on_ranks(2)
def test_a_static_graph_that_changes_is_named_as_the_cause() -> None:
    class Grows(Two):
        has_grown = False

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) if self.has_grown else self.b(rows)

    model = DistributedDataParallel(Grows(), static_graph=True)
    run_step(model)
    model.module.has_grown = True
    try:
        run_step(model)
    except RuntimeError as error:
        assert "twice" not in str(error)  # noqa: PT017
        return
    assert_right(model)
