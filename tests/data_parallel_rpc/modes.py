"""One scenario, two modes: gradients of loss.backward() and of dist_autograd.backward, to be compared.

    @in_both_modes
    def test_a_step(trainer: Trainer, mode: Mode) -> list[Any]:
        model = ddp(trainer, net())
        with mode(model) as step:
            step.backward(loss_of(model, trainer, 0))
            return [step.gradients(model)]

A scenario is a function of a trainer and a mode. It wraps a model of its own, makes steps, and returns what
it saw. Under distributed autograd `.grad` must stay what it was, and every step sees to that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.data_parallel.twins import WIDTH, assert_same_gradient
from tests.data_parallel_rpc.libraries import dist_autograd
from tests.data_parallel_rpc.trainers import Trainer

Gradients = dict[str, Any]  # tensors, or None


class Step(Protocol):
    """One step of a model: its gradients begin at nothing and add up."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None: ...

    def gradients(self, model: nn.Module) -> Gradients: ...


Mode = Callable[[nn.Module], Any]


class PlainStep:
    """loss.backward(): gradients are in `.grad`."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def gradients(self, model: nn.Module) -> Gradients:
        return {name: copied(param.grad) for name, param in named_parameters(model)}


class ContextStep:
    """dist_autograd.backward: gradients are in the context."""

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        dist_autograd.backward(self.context_id, [loss], retain_graph=retain_graph)

    def gradients(self, model: nn.Module) -> Gradients:
        return context_gradients(self.context_id, model)


@contextmanager
def plain(model: nn.Module) -> Generator[Step]:
    model.zero_grad(set_to_none=True)
    yield PlainStep()


@contextmanager
def in_context(model: nn.Module) -> Generator[Step]:
    with untouched_grad(model), dist_autograd.context() as context_id:
        yield ContextStep(context_id)


@contextmanager
def untouched_grad(model: nn.Module) -> Generator[None]:
    """Give some parameters a `.grad`, and the others none; fail if one is another, or other, at the end."""
    params = [param for _, param in named_parameters(model)]
    before = [torch.full_like(param, 7.0).detach() if i % 2 == 0 else None for i, param in enumerate(params)]
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
    yield
    for (name, param), grad in zip(named_parameters(model), before, strict=True):
        assert param.grad is grad, f"{name} has another .grad"
        assert grad is None or bool((local_of(grad) == 7.0).all()), f"the .grad of {name} was changed"


def context_gradients(context_id: int, model: nn.Module) -> Gradients:
    """What the context has for the model's parameters, by name; None for those it doesn't know."""
    found = dist_autograd.get_gradients(context_id)
    return {name: copied(found.get(param)) for name, param in named_parameters(model)}


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """By the bare model's names."""
    named = model.named_parameters(remove_duplicate=True)
    return [(name.removeprefix("module."), param) for name, param in named]


def copied(grad: Tensor | None) -> Tensor | None:
    """A copy; of a DTensor, the full tensor, which all trainers must ask for together."""
    if isinstance(grad, DTensor):
        return grad.full_tensor().detach().clone()
    return None if grad is None else grad.detach().clone()


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_both_modes(scenario: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a scenario: run it in both modes, and fail if it saw different things."""

    @functools.wraps(scenario)
    def test(trainer: Trainer, **args: Any) -> None:
        right = scenario(trainer=trainer, mode=plain, **args)
        assert right, "a scenario that sees nothing shows nothing"
        assert_same(scenario(trainer=trainer, mode=in_context, **args), right, scenario.__name__)

    signature = inspect.signature(scenario)
    kept = [each for name, each in signature.parameters.items() if name != "mode"]
    test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return test


def assert_same(seen: Any, right: Any, where: str) -> None:
    """Tensors may differ by some roundings, all else must be equal."""
    if isinstance(right, dict):
        assert list(seen) == list(right), where
        for key, value in right.items():
            assert_same(seen[key], value, f"{where}, {key}")
    elif isinstance(right, list | tuple):
        assert len(seen) == len(right), f"{where}: {len(seen)} instead of {len(right)}"
        for i, (one, other) in enumerate(zip(seen, right, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif right is None or isinstance(right, Tensor):
        assert_same_gradient(seen, right, where)
    else:
        assert seen == right, where


def rows_of(rank: int, step: int = 0, num_rows: int = 3) -> Tensor:
    """The rows that a trainer has in a step, the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)


# What scenarios share

SMALL_MB = 0.0001  # a bucket for each parameter


def loss_of(model: nn.Module, trainer: Trainer, step: int) -> Tensor:
    return model(rows_of(trainer.rank, step)).square().mean()


def make_steps(model: Any, trainer: Trainer, mode: Mode, num_steps: int = 3) -> list[Any]:
    seen: list[Any] = []
    for i in range(num_steps):
        with mode(model) as step:
            step.backward(loss_of(model, trainer, i))
            seen.append(step.gradients(model))
    return seen


def noting_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
    """Twice the mean, and a note of what the bucket said of itself."""
    notes, group = state
    notes.append((bucket.index(), bucket.is_last(), len(bucket.parameters()), bucket.buffer().clone()))
    flat = bucket.buffer().mul_(2).div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
