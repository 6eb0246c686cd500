"""An owner's steps of SparseAdam: torch's numbers and state, and whoever listens to steps hears of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import _functional
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.dist_autograd.both_optimizers import (
    Both,
    Give,
    check_close,
    random,
    rows_of,
    step_local,
    step_plain,
)
from weft.dist_autograd.optimizer import LocalOptimizer


@pytest.fixture
def torchs_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each step of a group in torch's own form was for."""
    seen: list[int] = []
    step_by_torch = _functional.sparse_adam

    def count(params: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        seen.append(len(params))
        step_by_torch(params, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(_functional, "sparse_adam", count)
    return seen


def sparse_both(
    give: Give, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> Both:
    values = [random(*shape, seed=place, dtype=dtype) for place, shape in enumerate(shapes)]
    return Both(give, optim.SparseAdam, values, **{"lr": 0.1, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 3)])
def test_rows_are_stepped_as_torch_does(
    give: Give, torchs_steps: list[int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    both = sparse_both(give, shape, dtype=dtype)
    for step, rows in enumerate([[0, 3], [3], [5, 1, 3], [0, 1, 2, 3, 4, 5]]):
        both.step_rows(rows, seed=step)
        both.check()
    assert torchs_steps == [1] * 4  # the plain one's; the owner's are weft's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_is_there_several_times_is_averaged_once(give: Give, dtype: torch.dtype) -> None:
    both = sparse_both(give, (6, 3), dtype=dtype)
    for step, rows in enumerate([[2, 2], [5, 2, 5, 5, 0], [0, 0, 2]]):
        both.step_rows(rows, seed=step)
        both.check()


def test_rows_without_a_gradient_stay(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    before = both.params[0].detach().clone()
    both.step_rows([1, 4], seed=0)
    assert (both.params[0] == before).all(dim=1).tolist() == [True, False, True, True, False, True]


def test_an_empty_gradient_counts_as_a_step_and_changes_no_row(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    both.step_rows([], seed=0)
    assert both.local.state_dict()["state"][0]["step"] == 1
    assert torch.equal(both.params[0], random(6, 3, seed=0))
    for step, rows in enumerate([[1, 2], [], [2]]):
        both.step_rows(rows, seed=step)
        both.check()


def test_a_parameter_without_a_gradient_has_no_step(give: Give) -> None:
    both = sparse_both(give, (6, 3), (4, 2))
    both.step_rows([1], None, seed=0)
    assert list(both.local.state_dict()["state"]) == [0]
    for step, rows in enumerate([(None, [3]), ([0, 1], [3, 3]), ([1], None)]):
        both.step_rows(*rows, seed=step)
        both.check()
    assert [state["step"] for state in both.local.state_dict()["state"].values()] == [3, 2]


def test_a_step_without_any_gradient_changes_nothing(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    both.step_rows(None, seed=0)
    assert both.local.state_dict()["state"] == {}
    assert torch.equal(both.params[0], random(6, 3, seed=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"lr": torch.tensor(0.05, dtype=torch.float64)},
        {"lr": torch.tensor([0.05], dtype=torch.float64)},
        {"betas": (0.3, 0.6)},
        {"betas": (0.0, 0.0)},
        {"eps": 0.5},
    ],
)
def test_options_count(give: Give, options: dict[str, Any], dtype: torch.dtype) -> None:
    both = sparse_both(give, (6, 3), dtype=dtype, **options)
    for step, rows in enumerate([[0, 3], [3, 3, 1], [1, 3]]):
        both.step_rows(rows, seed=step)
        both.check()


def test_maximize_goes_the_other_way(give: Give) -> None:
    down, up = sparse_both(give, (6, 3)), sparse_both(give, (6, 3), maximize=True)
    start = down.params[0].detach().clone()
    for both in (down, up):
        both.step_rows([0, 3], seed=0)
    check_close(start - down.params[0], up.params[0] - start)


def in_groups(params: Sequence[Tensor], **options: Any) -> optim.SparseAdam:
    first, second, third = params
    return optim.SparseAdam(
        [
            {"params": [first, second], "lr": 0.2},
            {"params": [third], "lr": torch.tensor(0.01), "betas": (0.5, 0.7), "maximize": True},
        ],
        **options,
    )


def test_each_group_has_its_own_options(give: Give, torchs_steps: list[int]) -> None:
    both = Both(give, in_groups, [random(5, 2, seed=place) for place in range(3)], eps=1e-6)
    for step, rows in enumerate([([0], [1, 1], [2, 3]), (None, [1], [3]), ([4, 0], [1], None)]):
        both.step_rows(*rows, seed=step)
        both.check()
    assert torchs_steps == [2, 1, 1, 1, 2, 0]  # the plain one's, a group at a time


def test_a_rate_that_is_changed_counts(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    for step, rate in enumerate([0.1, 0.4, 0.01]):
        for optimizer in (both.local.optim, both.plain):
            optimizer.param_groups[0]["lr"] = rate
        both.step_rows([2, 4], seed=step)
        both.check()


def test_gradients_of_single_elements_are_torchs_to_step(give: Give, torchs_steps: list[int]) -> None:
    both = sparse_both(give, (6, 3), (4, 2))
    for step in range(3):
        elements = torch.tensor([[0, 5, 5], [1, 2, 2]])
        single = torch.sparse_coo_tensor(elements, random(3, seed=step), (6, 3))
        assert single.sparse_dim() == 2
        both.step(single, rows_of(both.params[1], [1, 3], step))
        both.check()
    assert torchs_steps == [2] * 6  # the owner's too


def test_gradients_of_rows_and_of_elements_may_alternate(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    for step in range(4):
        rows = rows_of(both.params[0], [1, 4, 1], step)
        both.step(rows if step % 2 else rows.to_dense().to_sparse())
        both.check()


def test_a_dense_gradient_is_refused_and_changes_no_parameter(give: Give) -> None:
    both = sparse_both(give, (6, 3), (4, 2))
    sparse, dense = rows_of(both.params[0], [1], 0), torch.ones(4, 2)
    for step in (
        lambda: step_local(give, both.local, both.params, [sparse, dense]),
        lambda: step_plain(both.plain, both.wanted, [sparse, dense]),
    ):
        with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
            step()
    assert torch.equal(both.params[0], random(6, 3, seed=0))
    assert torch.equal(both.params[1], random(4, 2, seed=1))
    both.check()
    both.step_rows([1, 2], [0], seed=1)
    both.check()


def test_a_dense_gradient_alone_leaves_the_state_empty(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        step_local(give, both.local, both.params, [torch.ones(6, 3)])
    assert not both.local.optim.state.get(both.local.optim.param_groups[0]["params"][0])
    assert torch.equal(both.params[0], random(6, 3, seed=0))


@pytest.mark.parametrize("maximize", [False, True])
def test_the_contexts_gradients_stay_as_they_are(give: Give, maximize: bool) -> None:
    both = sparse_both(give, (6, 3), maximize=maximize)
    grad = rows_of(both.params[0], [0, 2], 0).coalesce()
    before = grad.clone()
    give({both.params[0]: grad})
    both.local.step(0)
    assert torch.equal(grad.to_dense(), before.to_dense())


def test_a_table_that_does_not_lie_in_one_piece(give: Give) -> None:
    memory = random(6, 4, seed=0)
    param, wanted = nn.Parameter(memory.clone()[:, ::2]), nn.Parameter(memory.clone()[:, ::2])
    assert not param.is_contiguous()
    local, plain = LocalOptimizer(optim.SparseAdam, [param], (), {"lr": 0.1}), optim.SparseAdam([wanted], 0.1)
    for step in range(3):
        grads: list[Tensor | None] = [rows_of(param, [5, 1, 5], step)]
        step_local(give, local, [param], grads)
        step_plain(plain, [wanted], grads)
        check_close(param, wanted)


def test_a_backward_notices_a_step_of_rows(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    loss = both.params[0].square().sum()
    both.step_rows([1], seed=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_table_may_get_another_dtype_between_steps(give: Give, dtype: torch.dtype) -> None:
    both = sparse_both(give, (6, 3))
    both.step_rows([1, 2], seed=0)
    for param in (*both.params, *both.wanted):
        param.data = param.data.to(dtype)
    both.step_rows([2, 4], seed=1)  # torch's own goes on
    torch.testing.assert_close(both.params, both.wanted, rtol=2e-3, atol=1e-3)


# State of SparseAdam


def test_torch_goes_on_from_the_owners_state(give: Give) -> None:
    both = sparse_both(give, (6, 3), (4,))
    for step in range(2):
        both.step_rows([1, 1, 4], [2], seed=step)
    fresh: list[Tensor] = [nn.Parameter(param.detach().clone()) for param in both.params]
    both.wanted, both.plain = fresh, optim.SparseAdam(fresh, lr=7.0)
    both.plain.load_state_dict(both.local.state_dict())
    for step in range(2, 4):
        both.step_rows([4, 0], [2, 3, 2], seed=step)
        both.check()


def test_the_owner_goes_on_from_torchs_state(give: Give, torchs_steps: list[int]) -> None:
    both = sparse_both(give, (6, 3), (4,))
    for step in range(2):
        both.step_rows([1, 1, 4], [2], seed=step)
    both.params = [nn.Parameter(param.detach().clone()) for param in both.wanted]
    both.local = LocalOptimizer(optim.SparseAdam, both.params, (), {"lr": 7.0})
    both.local.load_state_dict(copy.deepcopy(both.plain.state_dict()))
    torchs_steps.clear()
    for step in range(2, 4):
        both.step_rows([4, 0], [2, 3, 2], seed=step)
        both.check()
    assert torchs_steps == [2, 2]  # the plain one's


def test_the_state_is_of_the_kinds_that_torchs_is(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    both.step_rows([1], seed=0)
    ours, torchs = both.local.state_dict(), both.plain.state_dict()
    assert ours["param_groups"] == torchs["param_groups"]
    assert list(ours["state"][0]) == list(torchs["state"][0])
    assert type(ours["state"][0]["step"]) is type(torchs["state"][0]["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        assert ours["state"][0][name].dtype is torchs["state"][0][name].dtype
        assert not ours["state"][0][name].requires_grad


# Those who listen to steps


def test_hooks_run_once_a_step(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    seen: list[str] = []
    both.local.optim.register_step_pre_hook(lambda *_: seen.append("before"))
    both.local.optim.register_step_post_hook(lambda *_: seen.append("after"))
    for step in range(2):
        both.step_rows([1, 3], seed=step)
        both.check()
    assert seen == ["before", "after"] * 2


def test_a_hook_finds_the_gradients_and_the_optimizer(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    seen: list[Any] = []

    def look(optimizer: Any, *_: Any) -> None:
        seen.append((optimizer, optimizer.param_groups[0]["params"][0].grad.to_dense()))

    both.local.optim.register_step_pre_hook(look)
    both.step_rows([1, 3], seed=0)
    ((optimizer, grad),) = seen
    assert optimizer is both.local.optim
    assert torch.equal(grad, rows_of(both.params[0], [1, 3], 0).to_dense())


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers_run_once_a_step(
    give: Give, torchs_steps: list[int], register: Callable[..., Any]
) -> None:
    both = sparse_both(give, (6, 3))
    seen: list[Any] = []
    handle = register(lambda optimizer, *_: seen.append(optimizer))
    try:
        for step in range(2):
            both.step_rows([1, 3], seed=step)
            both.check()
    finally:
        handle.remove()
    assert seen == [both.local.optim, both.plain] * 2
    torchs_steps.clear()
    both.step_rows([1], seed=2)
    both.check()
    assert len(seen) == 4
    assert torchs_steps == [1]  # without hooks it is weft's step again


def test_a_hook_that_is_removed_hears_no_more(give: Give, torchs_steps: list[int]) -> None:
    both = sparse_both(give, (6, 3))
    seen: list[int] = []
    handle = both.local.optim.register_step_post_hook(lambda *_: seen.append(1))
    both.step_rows([1, 3], seed=0)
    handle.remove()
    torchs_steps.clear()
    both.step_rows([1], seed=1)
    both.check()
    assert seen == [1]
    assert torchs_steps == [1]


def test_a_scheduler_sees_the_steps(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in (both.local.optim, both.plain)]
    for step in range(3):
        both.step_rows([1, 3, 3], seed=step)
        both.check()
        for scheduler in schedulers:
            scheduler.step()  # warns, which is an error here, where no step came before
    assert both.local.optim.param_groups[0]["lr"] == 0.1 / 8


def test_parameters_that_share_memory_are_stepped_one_after_the_other(give: Give) -> None:
    def make() -> list[Tensor]:
        memory = random(4, 2, seed=0)
        return [nn.Parameter(memory), nn.Parameter(memory)]

    params, wanted = make(), make()
    local = LocalOptimizer(optim.SparseAdam, params, (), {"lr": 0.1})
    plain = optim.SparseAdam(wanted, lr=0.1)
    for step in range(3):
        grads: list[Tensor | None] = [rows_of(param, [1, 3], step) for param in params]
        step_local(give, local, params, grads)
        step_plain(plain, wanted, grads)
        check_close(params[0], wanted[0])


def test_an_empty_gradient_does_not_count_as_a_change(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    both.step_rows([1], seed=0)
    loss = both.params[0].square().sum()
    step_local(give, both.local, both.params, [rows_of(both.params[0], [], 1)])
    loss.backward()  # which would notice


def test_values_that_do_not_lie_in_one_piece(give: Give) -> None:
    both = sparse_both(give, (6, 3))
    for step in range(2):
        turned = random(3, 2, seed=step).t()
        grad = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), turned, (6, 3), is_coalesced=True)
        assert not grad.values().is_contiguous()
        both.step(grad)
        both.check()


def test_steps_are_counted_exactly_whatever_the_default_dtype(give: Give) -> None:
    both = sparse_both(give, (6, 3), betas=(0.9, 0.9999))
    both.step_rows([1], seed=0)
    for optimizer in (both.local.optim, both.plain):
        for state in optimizer.state.values():
            state["step"] = 300  # more than bfloat16 counts
    torch.set_default_dtype(torch.bfloat16)
    try:
        both.step(rows_of(both.params[0], [1, 4], 1))
    finally:
        torch.set_default_dtype(torch.float32)
    both.check()
