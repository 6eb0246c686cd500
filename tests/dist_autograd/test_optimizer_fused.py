"""An owner's steps of Adam and AdamW: torch's fused operation where it is right, its own step elsewhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR

import weft
from tests.dist_autograd.both_optimizers import (
    Both,
    Give,
    check_close,
    random,
    rows_of,
    step_local,
    step_plain,
)
from tests.ranks import run_on
from tests.rpc.workers import from_worker0, with_options
from weft import DistributedOptimizer, dist_autograd, rpc
from weft.dist_autograd.optimizer import LocalOptimizer
from weft.dist_autograd.quick_steps import step_quickly


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each of torch's fused operations was for."""
    seen: list[int] = []
    for name in ("_fused_adam_", "_fused_adamw_"):
        step = getattr(torch, name)

        def count(params: Sequence[Tensor], *args: Any, step: Any = step, **kwargs: Any) -> None:
            seen.append(len(params))
            step(params, *args, **kwargs)

        monkeypatch.setattr(torch, name, count)
    return seen


def dense_both(give: Give, kind: Callable[..., optim.Optimizer], dtype: torch.dtype, **options: Any) -> Both:
    values = [random(*shape, seed=len(shape), dtype=dtype) for shape in ((), (5,), (4, 3), (2, 3, 2))]
    return Both(give, kind, values, **options)


def step_densely(both: Both, seed: int) -> None:
    both.step(*(random(*param.shape, seed=seed, dtype=param.dtype) for param in both.params))


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_parameters_on_the_cpu_are_stepped_at_once(
    give: Give, fused_steps: list[int], kind: Callable[..., optim.Optimizer], dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)), torch.zeros(3, dtype=dtype, requires_grad=True)]
    local = LocalOptimizer(kind, params, (), {"lr": 0.1})
    step_local(give, local, params, [torch.ones_like(param) for param in params])
    assert fused_steps == [2]
    assert local.optim.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize(
    "chosen", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"lr": torch.tensor(0.1)}]
)
def test_who_chooses_a_form_gets_it(
    give: Give, fused_steps: list[int], kind: Callable[..., optim.Optimizer], chosen: dict[str, Any]
) -> None:
    both = dense_both(give, kind, torch.float32, **chosen)
    step_densely(both, 0)
    both.check()
    assert fused_steps == []


class Own(optim.Adam):
    pass


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_other_parameters_are_for_the_optimizer_itself(
    give: Give, fused_steps: list[int], dtype: torch.dtype
) -> None:
    params = [nn.Parameter(torch.zeros(2, dtype=each)) for each in (torch.float32, dtype)]
    local = LocalOptimizer(optim.Adam, params, (), {"lr": 0.1})
    step_local(give, local, params, [torch.ones_like(each) for each in params])
    assert fused_steps == []
    assert all((each != 0).all() for each in params)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad, Own])
def test_other_optimizers_step_themselves(
    give: Give, fused_steps: list[int], kind: Callable[..., optim.Optimizer]
) -> None:
    both = dense_both(give, kind, torch.float32, lr=0.1)
    step_densely(both, 0)
    both.check()
    assert fused_steps == []


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"amsgrad": True, "weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.8), "eps": 1e-3},
    ],
)
def test_the_fused_form_gives_what_the_plain_one_gives(
    give: Give,
    fused_steps: list[int],
    kind: Callable[..., optim.Optimizer],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    both = dense_both(give, kind, dtype, **options)
    for step in range(4):
        step_densely(both, step)
        both.check()
    assert fused_steps == [4] * 4


def test_a_profile_shows_the_optimizers_step(give: Give) -> None:
    both = Both(give, optim.Adam, [random(4, 2, seed=0)], lr=0.1)
    with torch.autograd.profiler.profile() as profile:
        step_densely(both, 0)
    assert sum("Adam.step" in event.name for event in profile.function_events) == 2


def test_a_parameter_that_was_given_twice_is_for_the_optimizer_itself(
    give: Give, fused_steps: list[int]
) -> None:
    param = nn.Parameter(torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of duplicates
        local = LocalOptimizer(optim.Adam, [param, param], (), {"lr": 0.1})
    step_local(give, local, [param], [torch.ones(2)])
    assert fused_steps == []


def test_the_fused_form_steps_what_has_gradients(give: Give) -> None:
    both = Both(give, optim.Adam, [random(4, 2, seed=place) for place in range(2)], lr=0.1)
    one, other = random(4, 2, seed=5), random(4, 2, seed=6)
    for grads in [(one, None), (None, other), (one, other), (None, None)]:
        both.step(*grads)
        both.check()


def test_the_fused_form_leaves_the_contexts_gradients_as_they_are(give: Give) -> None:
    both = Both(give, optim.Adam, [random(4, 2, seed=0)], lr=0.1, maximize=True, weight_decay=0.1)
    grad = random(4, 2, seed=1)
    give({both.params[0]: grad})
    both.local.step(0)
    assert torch.equal(grad, random(4, 2, seed=1))


def test_a_sparse_gradient_is_refused_as_torch_does(give: Give) -> None:
    both = Both(give, optim.Adam, [random(6, 3, seed=0)])
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        step_local(give, both.local, both.params, [rows_of(both.params[0], [1], 0)])
    assert torch.equal(both.params[0], random(6, 3, seed=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_adam_goes_on_from_the_fused_state(give: Give, dtype: torch.dtype) -> None:
    both = dense_both(give, optim.Adam, dtype, amsgrad=True, weight_decay=0.1)
    for step in range(2):
        step_densely(both, step)
    resumed: list[Tensor] = [nn.Parameter(param.detach().clone()) for param in both.params]
    plain = optim.Adam(resumed, amsgrad=True, weight_decay=0.1)
    plain.load_state_dict(both.local.state_dict())
    for step in range(2, 4):
        grads: list[Tensor | None] = [random(*param.shape, seed=step, dtype=dtype) for param in resumed]
        step_plain(plain, resumed, grads)
        step_plain(both.plain, both.wanted, grads)
    check_close(resumed, both.wanted, dtype)
    check_close(plain.state_dict()["state"], both.plain.state_dict()["state"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_owner_goes_on_from_plain_adams_state(give: Give, dtype: torch.dtype) -> None:
    both = dense_both(give, optim.Adam, dtype, amsgrad=True, weight_decay=0.1)
    for step in range(2):
        step_densely(both, step)
    both.params = [nn.Parameter(param.detach().clone()) for param in both.wanted]
    both.local = LocalOptimizer(optim.Adam, both.params, (), {"lr": 7.0})
    both.local.load_state_dict(copy.deepcopy(both.plain.state_dict()))
    for step in range(2, 4):
        step_densely(both, step)
        both.check()


def test_hooks_and_a_scheduler_of_the_fused_form(give: Give) -> None:
    both = dense_both(give, optim.Adam, torch.float32)
    seen: list[str] = []
    both.local.optim.register_step_pre_hook(lambda *_: seen.append("before"))
    both.local.optim.register_step_post_hook(lambda *_: seen.append("after"))
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in (both.local.optim, both.plain)]
    for step in range(2):
        step_densely(both, step)
        both.check()
        for scheduler in schedulers:
            scheduler.step()
    assert seen == ["before", "after"] * 2


# Memory that is not walked through in order. `.grad` may lie otherwise than its parameter does.

LAYOUTS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda memory: memory[:, :2], Tensor.contiguous),  # a part of other memory
    (lambda memory: memory.t(), Tensor.contiguous),
    (lambda memory: memory, lambda grad: grad.t().contiguous().t()),
    (lambda memory: memory, lambda grad: grad[:1].expand_as(grad)),
]


@pytest.mark.parametrize(
    ("lay_param", "lay_grad"), LAYOUTS, ids=["part", "turned", "turned grad", "expanded"]
)
def test_strides_of_parameters_and_gradients_count(
    give: Give, lay_param: Callable[[Tensor], Tensor], lay_grad: Callable[[Tensor], Tensor]
) -> None:
    memory, wanted_memory = random(4, 4, seed=0), random(4, 4, seed=0)
    param, wanted = nn.Parameter(lay_param(memory)), nn.Parameter(lay_param(wanted_memory))
    local, plain = LocalOptimizer(optim.Adam, [param], (), {"lr": 0.1}), optim.Adam([wanted], lr=0.1)
    for step in range(2):
        grad = lay_grad(random(*param.shape, seed=step + 1))
        give({param: grad})
        local.step(0)
        wanted.grad = grad
        plain.step()
    check_close(param, wanted)
    check_close(memory, wanted_memory)


# `fused=True`, which a peer asks for: torch's kernels walk each tensor from its first element on


FUSED = [
    (optim.SGD, {"lr": 1.0, "momentum": 0.5}),
    (optim.Adam, {"lr": 0.5, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.5}),
    (optim.Adagrad, {"lr": 0.5}),
]
ROWS, COLUMNS = 40, 50


def step_once(
    kind: type[optim.Optimizer], options: dict[str, Any], grad: Tensor, state: Any = None
) -> Tensor:
    """A parameter's values after a step, with a gradient and a state that lie in any way."""
    local = LocalOptimizer(kind, [nn.Parameter(torch.zeros(COLUMNS, ROWS).t())], kwargs=options)
    ((_, twin),) = local._pairs
    if state is not None:
        twin.grad = torch.ones_like(twin)
        local.optim.step()
        for name in local.optim.state[twin].keys() - {"step"}:
            local.optim.state[twin][name] = state()
    twin.grad = grad
    step_quickly(local.optim)
    return twin.detach()


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_fused_kernels_walk_gradients_and_states_that_lie_in_any_way(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    """Torch's kernels walk each from its first element on: they would read and write beyond expanded ones."""
    fused = options | {"fused": True}
    grads = [
        torch.tensor(2.0).expand(ROWS, COLUMNS),
        torch.arange(float(COLUMNS)).expand(ROWS, COLUMNS),
        torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS),
        torch.arange(float(2 * ROWS * COLUMNS)).view(ROWS, 2 * COLUMNS)[:, ::2],
    ]
    for grad in grads:
        torch.testing.assert_close(step_once(kind, fused, grad), step_once(kind, options, grad.clone()))
        expanded = step_once(kind, fused, grad, lambda: torch.tensor(0.5).expand(ROWS, COLUMNS))
        written_out = step_once(kind, options, grad.clone(), lambda: torch.full((ROWS, COLUMNS), 0.5))
        torch.testing.assert_close(expanded, written_out)


def test_fused_kernels_get_no_parameter_that_lies_in_its_own_way() -> None:
    for param in (torch.zeros(1).expand(100), torch.zeros(100, 2)[:, 0]):
        local = LocalOptimizer(optim.SGD, [param.requires_grad_()], kwargs={"lr": 1.0, "fused": True})
        ((_, twin),) = local._pairs
        twin.grad = torch.ones(100)
        with pytest.raises(weft.ConfigError, match="elements must lie side by side"):
            step_quickly(local.optim)


@pytest.mark.parametrize("state", [torch.zeros(1), torch.zeros(100, 1), torch.zeros(100).to_sparse()])
def test_fused_kernels_get_no_state_of_another_shape(state: Tensor) -> None:
    local = LocalOptimizer(optim.Adam, [torch.zeros(100).requires_grad_()], kwargs={"lr": 1.0, "fused": True})
    ((_, twin),) = local._pairs
    twin.grad = torch.ones(100)
    step_quickly(local.optim)
    local.optim.state[twin]["exp_avg"] = state
    with pytest.raises(weft.ConfigError, match="the state 'exp_avg' of a parameter"):
        step_quickly(local.optim)


@run_on(threads=2, timeout=60, collective_timeout=60)
@with_options(allow=["torch.optim.Adam", "torch.mul"])
@from_worker0
def test_fused_kernels_get_no_state_that_is_too_short() -> None:
    weight = rpc.remote("worker1", torch.mul, (torch.ones(100), 3.0))
    for is_fused in (True, False):
        optimizer = DistributedOptimizer(optim.Adam, [weight], lr=0.1, fused=is_fused)
        state = optimizer.state_dict()["worker1"]
        kept = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(3)}
        short = {**state, "state": {0: kept}}
        single = {**state, "state": {0: kept | {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}}}
        chosen = {
            **state,
            "param_groups": [{**group, "fused": not is_fused} for group in state["param_groups"]],
        }
        for crafted in (
            chosen,
            {"state": [], "param_groups": {}},
            *([short, single] if is_fused else []),
        ):
            with pytest.raises(weft.PeerError, match="has not the form that weft's workers send"):
                optimizer.load_state_dict({"worker1": crafted})
        optimizer.load_state_dict(optimizer.state_dict())


@run_on(threads=2, timeout=60, collective_timeout=60)
@from_worker0
def test_a_fused_step_with_the_gradient_of_a_sum() -> None:
    """It is one number, expanded: so it travels, and so it arrives at its parameter."""
    weight = rpc.remote("worker1", make_weight)
    optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0, fused=True)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [weight.to_here().sum()])
        optimizer.step(context_id)
    assert weight.to_here().equal(torch.full((10_000,), -1.0))


def make_weight() -> Tensor:
    return torch.zeros(10_000, requires_grad=True)
