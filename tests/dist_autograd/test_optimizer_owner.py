"""An owner's part of a distributed optimizer steps as any optimizer does, and leaves `grad` alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.dist_autograd.both_optimizers import Give
from weft.dist_autograd import optimizer as ours
from weft.dist_autograd.optimizer import LocalOptimizer
from weft.errors import ConfigError, ConfigTypeError

Gradients = dict[Tensor, Tensor]

KINDS = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.1}),
    (optim.Rprop, {"lr": 0.1}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adamax, {"lr": 0.1}),
]


def make_params(num: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 2, generator=generator)) for _ in range(num)]


def make_gradients(params: list[nn.Parameter], step: int) -> Gradients:
    generator = torch.Generator().manual_seed(step)
    return {param: torch.randn(param.shape, generator=generator) for param in params}


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_it_steps_as_the_optimizer_does(give: Give, kind: type[optim.Optimizer], options: Any) -> None:
    params, wanted = make_params(), make_params()
    local, plain = LocalOptimizer(kind, params, (), options), kind(wanted, **options)
    for step in range(3):
        give(make_gradients(params, step))
        local.step(0)
        for param, grad in make_gradients(wanted, step).items():
            param.grad = grad
        plain.step()
    for param, other in zip(params, wanted, strict=True):
        if kind in (optim.Adam, optim.AdamW):  # fused, which rounds in other places
            torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(param, other)


def test_grad_of_the_parameters_is_left_alone(give: Give) -> None:
    params = make_params(2)
    params[0].grad = kept = torch.full((4, 2), 7.0)
    give({param: torch.ones(4, 2) for param in params})
    LocalOptimizer(optim.SGD, params, (), {"lr": 0.1}).step(0)
    assert params[0].grad is kept
    assert torch.equal(kept, torch.full((4, 2), 7.0))
    assert params[1].grad is None


def test_a_parameter_without_a_gradient_stays(give: Give) -> None:
    params, before = make_params(2), make_params(2)
    params[1].grad = torch.ones(4, 2)  # not the context's
    give({params[0]: torch.ones(4, 2), torch.ones(1): torch.ones(1)})
    LocalOptimizer(optim.SGD, params, (), {"lr": 0.1, "weight_decay": 0.1}).step(0)
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's Adagrad
@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam, optim.Adagrad])
def test_sparse_gradients(give: Give, kind: Callable[..., optim.Optimizer]) -> None:
    table, wanted = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    wanted.load_state_dict(table.state_dict())
    rows = torch.tensor([0, 3, 3])
    for embedding in (table, wanted):
        embedding(rows).square().sum().backward()
    assert table.weight.grad is not None
    give({table.weight: table.weight.grad})
    LocalOptimizer(kind, [table.weight], (), {"lr": 0.1}).step(0)
    kind([wanted.weight], lr=0.1).step()
    torch.testing.assert_close(table.weight, wanted.weight, rtol=1e-6, atol=1e-7)  # weft's rounds elsewhere


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_given_twice_is_one_to_the_optimizer(give: Give) -> None:
    (param,), (wanted,) = make_params(1), make_params(1)
    give({param: torch.ones(4, 2)})
    LocalOptimizer(optim.SGD, [param, param], (), {"lr": 0.1, "foreach": False}).step(0)
    wanted.grad = torch.ones(4, 2)
    optim.SGD([wanted, wanted], lr=0.1, foreach=False).step()
    assert torch.equal(param, wanted)


class Assigning(optim.Optimizer):
    """One that makes new tensors, as programs from tutorials do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data = param.data - param.grad


def test_an_optimizer_may_give_parameters_other_memory(give: Give) -> None:
    (param,), (before,) = make_params(1), make_params(1)
    give({param: torch.ones(4, 2)})
    local = LocalOptimizer(Assigning, [param])
    local.step(0)
    local.step(0)
    assert torch.equal(param, before - 1 - 1)


@pytest.mark.parametrize("move", [nn.Module.double, nn.Module.half])
def test_a_module_may_move(give: Give, move: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Linear(2, 2)
    local = LocalOptimizer(optim.SGD, list(module.parameters()), (), {"lr": 0.5})
    move(module)
    before = module.bias.detach().clone()
    give({module.bias: torch.ones_like(module.bias)})
    local.step(0)
    assert torch.equal(module.bias, before - 0.5)


def test_a_part_of_the_memory_is_other_memory(give: Give) -> None:
    (param,) = make_params(1)
    local = LocalOptimizer(optim.SGD, [param], (), {"lr": 0.5})
    param.data = param.data[:2]
    before = param.detach().clone()
    give({param: torch.ones(2, 2)})
    local.step(0)
    assert torch.equal(param, before - 0.5)


def test_a_backward_notices_a_step_in_between(give: Give) -> None:
    (param,) = make_params(1)
    give({param: torch.ones(4, 2)})
    local = LocalOptimizer(optim.SGD, [param], (), {"lr": 0.5})
    loss = param.square().sum()
    local.step(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Failing(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("it can't")


def test_a_step_that_fails_leaves_nothing_behind(give: Give) -> None:
    (param,) = make_params(1)
    give({param: torch.ones(4, 2)})
    local = LocalOptimizer(Failing, [param])
    for _ in range(2):  # a lock that was kept would stop the second
        with pytest.raises(ArithmeticError, match="it can't"):
            local.step(0)
    assert param.grad is None
    assert [twin.grad for _, twin in local._pairs] == [None]


def test_what_no_optimizer_takes_is_refused() -> None:
    (param,) = make_params(1)
    with pytest.raises(ConfigError, match=r"can't optimize a non-leaf Tensor.*shape \(4, 2\)"):
        LocalOptimizer(optim.SGD, [param * 2], (), {"lr": 0.1})
    with pytest.raises(ConfigTypeError, match=r"optimizer can only optimize Tensors.*Linear"):
        LocalOptimizer(optim.SGD, [nn.Linear(1, 1)], (), {"lr": 0.1})  # type: ignore[list-item]


class Dawdling(optim.Optimizer):
    """Reads, and writes some time later what follows from that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        values = [param - param.grad for param in params]
        threading.Event().wait(0.001)
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def test_no_update_is_lost(give: Give) -> None:
    num_threads, num_steps = 6, 20
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    give({param: torch.ones(1) for param in params})
    # Each has the parameters in another order, and one more of its own.
    locals_ = [
        LocalOptimizer(Dawdling, [*params[index % 3 :], *params[: index % 3], nn.Parameter(torch.zeros(1))])
        for index in range(num_threads)
    ]

    def work(local: LocalOptimizer) -> None:
        for _ in range(num_steps):
            local.step(0)

    threads = [threading.Thread(target=work, args=(local,), daemon=True) for local in locals_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert [param.item() for param in params] == [-num_threads * num_steps] * 3


def test_locks_go_with_the_optimizers() -> None:
    params = make_params(2)
    gc.collect()
    before = len(ours._locks)
    locals_ = [LocalOptimizer(optim.SGD, params, (), {"lr": 0.1}) for _ in range(3)]
    assert len(ours._locks) == before + 2
    del locals_
    gc.collect()
    assert len(ours._locks) == before


def test_the_state_is_a_copy(give: Give) -> None:
    params = make_params(1)
    give(make_gradients(params, 0))
    local = LocalOptimizer(optim.SGD, params, (), {"lr": 0.1, "momentum": 0.9})
    local.step(0)
    state = local.state_dict()
    kept = state["state"][0]["momentum_buffer"].clone()
    local.step(0)
    assert torch.equal(state["state"][0]["momentum_buffer"], kept)
    local.load_state_dict(state)
    assert torch.equal(local.state_dict()["state"][0]["momentum_buffer"], kept)
