"""Scenarios that every way to be data parallel must pass: steps, accumulation, hooks of the user's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.twins import WIDTH, filled, net
from tests.ddp_rpc_bodies.libraries import on_this_library
from tests.ddp_rpc_bodies.modes import Mode, Scenario, compare, copied, named_parameters, rows_of
from tests.ddp_rpc_bodies.running import Body, Trainer
from tests.ddp_rpc_bodies.wraps import WRAPS, Wrap, sharded, without_sync


def loss_of(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    return model(rows_of(trainer.rank, step)).square().mean()


def steps(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    model = wrap(t, net())
    seen: list[Any] = []
    for i in range(3):
        with mode(model) as step:
            loss = loss_of(model, t, i)
            step.backward(loss)
            seen += [loss.detach(), step.gradients(model)]
    return seen


def accumulated(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Two forwards and backwards in one step."""
    model = wrap(t, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            for j in range(2):
                step.backward(loss_of(model, t, 10 * i + j))
                seen.append(step.gradients(model))
    return seen


def one_graph_twice(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Two losses of one forward, one backward after the other; then a step as always."""
    model = wrap(t, net())
    seen: list[Any] = []
    with mode(model) as step:
        output = model(rows_of(t.rank))
        step.backward(output.square().mean(), retain_graph=True)
        seen.append(step.gradients(model))
        step.backward(output.sum())
        seen.append(step.gradients(model))
    with mode(model) as step:
        step.backward(loss_of(model, t, 1))
        seen.append(step.gradients(model))
    return seen


def without_sync_first(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Local gradients add up, then all are reduced."""
    model = wrap(t, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            with without_sync(model):
                for j in range(2):
                    step.backward(loss_of(model, t, 10 * i + j))
            step.backward(loss_of(model, t, 10 * i + 2))
            seen.append(step.gradients(model))
    return seen


def forwards_before_backwards(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Two forwards, then one backward of both."""
    model = wrap(t, net())
    with mode(model) as step:
        losses = [loss_of(model, t, i) for i in range(2)]
        step.backward(losses[0] + losses[1])
        return [step.gradients(model)]


def frozen_parts(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    bare: Any = net()
    for param in bare[2].parameters():
        param.requires_grad_(False)
    model = wrap(t, bare)
    with mode(model) as step:
        step.backward(loss_of(model, t, 0))
        return [step.gradients(model)]


class Tied(nn.Module):
    """One weight, used twice and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        filled(self)
        self.last.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(rows)))))


class Checkpointed(nn.Module):
    """Its middle runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (filled(nn.Linear(WIDTH, WIDTH), seed) for seed in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, torch.tanh(self.first(rows)), use_reentrant=False))


def checkpointed(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    model = wrap(t, Checkpointed())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            step.backward(loss_of(model, t, i))
            seen.append(step.gradients(model))
    return seen


def tensor_hooks(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Hooks of outputs and of inputs run once with the whole gradient, as always."""
    model = wrap(t, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            rows = rows_of(t.rank, i).requires_grad_()
            rows.register_hook(lambda grad: seen.append(grad.clone()))
            output = model(rows)
            output.register_hook(lambda grad: 2 * grad)
            step.backward(output.square().mean())
            seen.append(step.gradients(model))
    return seen


def an_input_gets_its_gradient(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """Rows are a leaf that is nobody's parameter: its gradient is this trainer's own."""
    model = wrap(t, net())
    inputs = nn.Module()
    inputs.rows = nn.Parameter(rows_of(t.rank))
    with mode(nn.ModuleList([model, inputs])) as step:
        step.backward(model(inputs.rows).square().mean())
        return [step.gradients(model), step.gradients(inputs)]


def post_accumulate_hooks(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """They are called once a backward, and what they leave in `.grad` is the step's gradient."""
    model = wrap(t, net())
    seen: list[Any] = []
    calls: dict[str, int] = {}

    def leave_half(param: Tensor, name: str) -> None:
        calls[name] = calls.get(name, 0) + 1
        assert param.grad is not None
        param.grad = param.grad / 2

    def leave_nothing(param: Tensor, name: str) -> None:
        calls[name] = calls.get(name, 0) + 1
        assert param.grad is not None
        param.grad = None

    for i, (name, param) in enumerate(named_parameters(model)):
        hook = (leave_half, leave_nothing)[i % 2]
        param.register_post_accumulate_grad_hook(partial(hook, name=name))
    for i in range(2):
        with mode(model) as step:
            step.backward(loss_of(model, t, i))
            seen += [dict(sorted(calls.items())), step.gradients(model)]
    return seen


def post_accumulate_hooks_see(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """What is in `.grad` when they are called."""
    model = wrap(t, net())
    held: dict[str, Tensor | None] = {}
    for name, param in named_parameters(model):

        def note(param: Tensor, name: str = name) -> None:
            held[name] = None if param.grad is None else param.grad.detach().clone()

        param.register_post_accumulate_grad_hook(note)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            step.backward(loss_of(model, t, i))
            seen.append({name: copied(grad) for name, grad in sorted(held.items())})
    return seen


def two_modules(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """One after the other in one graph."""
    models = nn.ModuleList([wrap(t, net(2)), wrap(t, filled(nn.Sequential(nn.Linear(WIDTH, WIDTH)), 5))])
    seen: list[Any] = []
    for i in range(2):
        with mode(models) as step:
            step.backward(models[1](torch.tanh(models[0](rows_of(t.rank, i)))).square().mean())
            seen.append(step.gradients(models))
    return seen


def forward_in_no_grad_between(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    """An evaluation in the middle of a step records nothing."""
    model = wrap(t, net())
    with mode(model) as step:
        loss = loss_of(model, t, 0)
        with torch.no_grad():
            evaluated = model(rows_of(t.rank, 5))
        step.backward(loss)
        return [evaluated, step.gradients(model)]


def tied(wrap: Wrap, t: Trainer, mode: Mode) -> list[Any]:
    options = {"by_child": False} if wrap is sharded else {}
    model = wrap(t, Tied(), **options)
    with mode(model) as step:
        step.backward(loss_of(model, t, 0))
        return [step.gradients(model)]


def with_each_wrap(scenario: Any) -> Body:
    """A body that compares the modes with each way to be data parallel."""

    def body(trainer: Trainer) -> None:
        for wrap in WRAPS:
            with_wrap: Scenario = partial(scenario, wrap)
            with_wrap.__name__ = f"{scenario.__name__} with {wrap.__name__}"  # type: ignore[attr-defined]
            compare(with_wrap, trainer)

    body.__name__ = scenario.__name__
    return body


SCENARIOS = [
    steps,
    accumulated,
    one_graph_twice,
    without_sync_first,
    forwards_before_backwards,
    frozen_parts,
    tied,
    checkpointed,
    tensor_hooks,
    an_input_gets_its_gradient,
    two_modules,
    forward_in_no_grad_between,
]
# torch does not call them under distributed autograd.
WEFT_SCENARIOS = [post_accumulate_hooks, post_accumulate_hooks_see]
BODIES = [with_each_wrap(scenario) for scenario in on_this_library(SCENARIOS, WEFT_SCENARIOS)]
