"""What changes after wrapping: parameters frozen, thawed, replaced, untied; the group; and steps that failed.

Frozen before construction: never reduced, no gradient. Frozen later: like an unused one. Thawed later: right,
or an error with its name; a gradient that differs from rank to rank without a word is what must not be.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import weft
from tests.data_parallel.hooks import names_in, noting_hook
from tests.data_parallel.libraries import weft_only
from tests.data_parallel.twins import Twin, gradients_of, make_rows, net, refusal_of
from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.errors import WeftError

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, True])


@VIEW
def test_one_frozen_before_construction_is_never_reduced(view: bool) -> None:
    model = net()
    model[2].requires_grad_(False)
    twin = Twin(model, gradient_as_bucket_view=view)
    seen: list = []
    twin.parallel.register_comm_hook(seen, noting_hook)
    for step in range(3):
        twin.step(make_rows(step))
    reduced = {name for names in names_in(seen, twin.parallel) for name in names}
    assert reduced == {"0.weight", "0.bias", "4.weight", "4.bias"}


def test_one_frozen_before_construction_is_broadcast_all_the_same() -> None:
    model = net()
    model[2].requires_grad_(False)
    nn.init.constant_(model[2].weight, float(dist.get_rank() + 5))
    twin = Twin(model)
    assert (twin.parallel.module[2].weight == 5).all()


@weft_only("raises: it expected a gradient")
@VIEW
@pytest.mark.parametrize("steps_before", [0, 2])
def test_one_frozen_after_wrapping_is_like_an_unused_one(view: bool, steps_before: int) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    for step in range(steps_before):
        twin.step(make_rows(step))
    for model in (twin.parallel.module, twin.single):
        model[2].requires_grad_(False)
    for step in range(2):
        twin.backward(make_rows(step + 10))
        assert gradients_of(twin.parallel)["2.weight"] is None
        twin.check()
        twin.update()
    for model in (twin.parallel.module, twin.single):
        model[2].requires_grad_(True)
    for step in range(2):
        twin.step(make_rows(step + 20))


@weft_only("leaves its gradient local, without a word")
@VIEW
@pytest.mark.parametrize("steps_before", [0, 2])
def test_one_thawed_after_wrapping_is_right_or_named(view: bool, steps_before: int) -> None:
    model = net()
    model[2].weight.requires_grad_(False)
    twin = Twin(model, gradient_as_bucket_view=view)
    for step in range(steps_before):
        twin.step(make_rows(step))
    for model in (twin.parallel.module, twin.single):
        model[2].weight.requires_grad_(True)
    refusal = refusal_of(lambda: [twin.step(make_rows(step + 10)) for step in range(2)])
    assert refusal is None or "2.weight" in str(refusal)


@weft_only("leaves its gradient local, without a word")
def test_one_replaced_after_wrapping_is_right_or_named() -> None:
    """`layer.weight = nn.Parameter(...)`, as pruning and adapters do it."""
    twin = Twin(net())
    twin.step(make_rows(0))
    for model in (twin.parallel.module, twin.single):
        model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
    refusal = refusal_of(lambda: twin.step(make_rows(1)))
    assert refusal is None or "2.weight" in str(refusal)


def test_a_module_in_which_nothing_needs_a_gradient_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't have any parameter"):
        Twin(model)


# -- the group, graphs, and steps that failed --------------------------------------------------


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


def test_autograd_grad_on_one_rank_alone_leaves_ranks_in_step() -> None:
    model = warmed_up()
    if dist.get_rank() == 0:
        rows = my_rows().requires_grad_()
        torch.autograd.grad(model(rows).sum(), rows)
    run_step(model)
    assert_right(model)


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_parameter_may_be_frozen_after_wrapping(num_before: int) -> None:
    model: Any = DistributedDataParallel(Two())
    for _ in range(num_before):
        run_step(model)
    model.module.a.weight.requires_grad_(False)
    for _ in range(3):
        run_step(model)
    assert model.module.a.weight.grad is None
    model.module.a.weight.requires_grad_(True)
    run_step(model)
    assert_right(model)


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


def test_ranks_with_different_histories_go_on_in_one_group() -> None:
    model = warmed_up()
    world, alone = model.process_group, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model._update_process_group(alone)
    for _ in range(1 + dist.get_rank()):
        run_step(model)
    model._update_process_group(world)
    run_step(model)
    assert_right(model)


def test_a_copy_is_in_the_group_that_its_model_is_in_now() -> None:
    model = warmed_up()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model._update_process_group(alone)
    assert copy.deepcopy(model).process_group is alone


@pytest.mark.parametrize("at", ["a", "b"])
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
def test_a_gradient_hooks_result_of_a_wrong_size_is_an_error(numel: int) -> None:
    def hook(state: object, bucket: weft.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer()[:numel])
        return future

    model = DistributedDataParallel(Two())
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="18"):
        run_step(model)


def test_a_bucket_may_be_without_limit() -> None:
    model = DistributedDataParallel(Two(), bucket_cap_mb=float("inf"))
    run_step(model)
    assert_right(model)


def test_a_delayed_parameter_that_is_not_there_is_an_error() -> None:
    module = Two()
    with pytest.raises(ValueError, match="nope"):
        DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[("nope", module.a.weight)],
            param_to_hook_all_reduce=module.b.weight,
        )


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
