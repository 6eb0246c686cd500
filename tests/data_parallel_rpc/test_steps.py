"""Steps, accumulation and hooks of the user's: the same with each way to be data parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.twins import WIDTH, filled, net
from tests.data_parallel_rpc.libraries import weft_only
from tests.data_parallel_rpc.modes import (
    Mode,
    copied,
    in_both_modes,
    loss_of,
    named_parameters,
    rows_of,
)
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    each_wrap,
    sharded,
    without_sync,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


@each_wrap
@in_both_modes
def test_steps(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    model = wrap(trainer, net())
    seen: list[Any] = []
    for i in range(3):
        with mode(model) as step:
            loss = loss_of(model, trainer, i)
            step.backward(loss)
            seen += [loss.detach(), step.gradients(model)]
    return seen


@each_wrap
@in_both_modes
def test_accumulation(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Two forwards and backwards in one step."""
    model = wrap(trainer, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            for j in range(2):
                step.backward(loss_of(model, trainer, 10 * i + j))
                seen.append(step.gradients(model))
    return seen


@each_wrap
@in_both_modes
def test_one_graph_twice(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Two losses of one forward, one backward after the other; then a step as always."""
    model = wrap(trainer, net())
    seen: list[Any] = []
    with mode(model) as step:
        output = model(rows_of(trainer.rank))
        step.backward(output.square().mean(), retain_graph=True)
        seen.append(step.gradients(model))
        step.backward(output.sum())
        seen.append(step.gradients(model))
    with mode(model) as step:
        step.backward(loss_of(model, trainer, 1))
        seen.append(step.gradients(model))
    return seen


@each_wrap
@in_both_modes
def test_local_gradients_add_up_before_a_sync(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Local gradients add up, then all are reduced."""
    model = wrap(trainer, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            with without_sync(model):
                for j in range(2):
                    step.backward(loss_of(model, trainer, 10 * i + j))
            step.backward(loss_of(model, trainer, 10 * i + 2))
            seen.append(step.gradients(model))
    return seen


@each_wrap
@in_both_modes
def test_forwards_before_backwards(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Two forwards, then one backward of both."""
    model = wrap(trainer, net())
    with mode(model) as step:
        losses = [loss_of(model, trainer, i) for i in range(2)]
        step.backward(losses[0] + losses[1])
        return [step.gradients(model)]


@each_wrap
@in_both_modes
def test_frozen_parameters(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    bare: Any = net()
    for param in bare[2].parameters():
        param.requires_grad_(False)
    model = wrap(trainer, bare)
    with mode(model) as step:
        step.backward(loss_of(model, trainer, 0))
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


@each_wrap
@in_both_modes
def test_checkpointing(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    model = wrap(trainer, Checkpointed())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            step.backward(loss_of(model, trainer, i))
            seen.append(step.gradients(model))
    return seen


@each_wrap
@in_both_modes
def test_tensor_hooks(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Hooks of outputs and of inputs run once with the whole gradient, as always."""
    model = wrap(trainer, net())
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            rows = rows_of(trainer.rank, i).requires_grad_()
            rows.register_hook(lambda grad: seen.append(grad.clone()))
            output = model(rows)
            output.register_hook(lambda grad: 2 * grad)
            step.backward(output.square().mean())
            seen.append(step.gradients(model))
    return seen


@each_wrap
@in_both_modes
def test_an_input_gets_its_gradient(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """Rows are a leaf that is nobody's parameter: its gradient is this trainer's own."""
    model = wrap(trainer, net())
    inputs = nn.Module()
    inputs.rows = nn.Parameter(rows_of(trainer.rank))
    with mode(nn.ModuleList([model, inputs])) as step:
        step.backward(model(inputs.rows).square().mean())
        return [step.gradients(model), step.gradients(inputs)]


@each_wrap
@weft_only("does not call them under distributed autograd")
@in_both_modes
def test_post_accumulate_hooks(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """They are called once a backward, and what they leave in `.grad` is the step's gradient."""
    model = wrap(trainer, net())
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
            step.backward(loss_of(model, trainer, i))
            seen += [dict(sorted(calls.items())), step.gradients(model)]
    return seen


@each_wrap
@weft_only("does not call them under distributed autograd")
@in_both_modes
def test_what_post_accumulate_hooks_see(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """What is in `.grad` when they are called."""
    model = wrap(trainer, net())
    held: dict[str, Tensor | None] = {}
    for name, param in named_parameters(model):

        def note(param: Tensor, name: str = name) -> None:
            held[name] = None if param.grad is None else param.grad.detach().clone()

        param.register_post_accumulate_grad_hook(note)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            step.backward(loss_of(model, trainer, i))
            seen.append({name: copied(grad) for name, grad in sorted(held.items())})
    return seen


@each_wrap
@in_both_modes
def test_two_modules(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """One after the other in one graph."""
    models = nn.ModuleList(
        [wrap(trainer, net(2)), wrap(trainer, filled(nn.Sequential(nn.Linear(WIDTH, WIDTH)), 5))]
    )
    seen: list[Any] = []
    for i in range(2):
        with mode(models) as step:
            step.backward(models[1](torch.tanh(models[0](rows_of(trainer.rank, i)))).square().mean())
            seen.append(step.gradients(models))
    return seen


@each_wrap
@in_both_modes
def test_a_forward_in_no_grad_between(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """An evaluation in the middle of a step records nothing."""
    model = wrap(trainer, net())
    with mode(model) as step:
        loss = loss_of(model, trainer, 0)
        with torch.no_grad():
            evaluated = model(rows_of(trainer.rank, 5))
        step.backward(loss)
        return [evaluated, step.gradients(model)]


@each_wrap
@in_both_modes
def test_tied_weights(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    options = {"by_child": False} if wrap is sharded else {}
    model = wrap(trainer, Tied(), **options)
    with mode(model) as step:
        step.backward(loss_of(model, trainer, 0))
        return [step.gradients(model)]
