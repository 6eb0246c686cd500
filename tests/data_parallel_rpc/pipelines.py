"""Models whose middle is on the server, and what their gradients must be.

The twin of such a model has everything in one place. It is given the rows of every trainer, one after the
other, without any data parallel: what a trainer's own gradients are, and their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.twins import WIDTH, assert_same_gradient, filled
from tests.data_parallel_rpc.libraries import rpc
from tests.data_parallel_rpc.modes import Gradients, context_gradients, copied, named_parameters, rows_of
from tests.data_parallel_rpc.trainers import Trainer

Loss = Callable[[nn.Module, int], Tensor]
FRONT, MIDDLE, BACK = 1, 2, 3


def make_part(seed: int) -> nn.Sequential:
    """Two layers, the same wherever they are made."""
    return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), seed)  # type: ignore[return-value]


def call_part(part: Any, *args: Any) -> Any:
    return part.local_value()(*args)


def part_gradients(part: Any, context_id: int) -> Gradients:
    return context_gradients(context_id, part.local_value())


def part_grads(part: Any) -> Gradients:
    return {name: copied(param.grad) for name, param in named_parameters(part.local_value())}


class RemotePart:
    """A module on another worker, called like one that is here. Being none, it is wrapped by nobody."""

    def __init__(self, owner: str, make: Callable[..., nn.Module], *args: Any) -> None:
        self.rref = rpc.remote(owner, make, args)

    def __call__(self, *args: Any) -> Any:
        return rpc.rpc_sync(self.rref.owner(), call_part, (self.rref, *args))

    def gradients(self, context_id: int) -> Gradients:
        return rpc.rpc_sync(self.rref.owner(), part_gradients, (self.rref, context_id))

    def grads(self) -> Gradients:
        """What its parameters have in `.grad`."""
        return rpc.rpc_sync(self.rref.owner(), part_grads, (self.rref,))


class Pipeline(nn.Module):
    """A front and a back, which are here, and a middle, which may be anywhere."""

    def __init__(self, front: nn.Module, middle: Callable[..., Any], back: nn.Module) -> None:
        super().__init__()
        self.front, self.back = front, back
        self.middle = middle

    def forward(self, rows: Tensor) -> Tensor:
        return self.back(torch.tanh(self.middle(torch.tanh(self.front(rows)))))


def make_twin() -> Pipeline:
    return Pipeline(make_part(FRONT), make_part(MIDDLE), make_part(BACK))


def mean_square(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(rows_of(rank, step)).square().mean()


def own_gradients(twin: nn.Module, loss: Tensor) -> Gradients:
    """What one trainer's loss gives, with nobody to reduce with."""
    twin.zero_grad(set_to_none=True)
    loss.backward()
    return {name: copied(param.grad) for name, param in named_parameters(twin)}


def every_ranks(twin: nn.Module, ranks: Sequence[int], loss: Loss) -> list[Gradients]:
    """Each trainer's own, by rank."""
    return [own_gradients(twin, loss(twin, rank)) for rank in ranks]


def mean_of(gradients: Sequence[Gradients], divisor: int | None = None) -> Gradients:
    """Their mean; those that some don't have count as zero there, and None is what nobody has."""
    mean: Gradients = {}
    for name in gradients[0]:
        there = [found for one in gradients if (found := one[name]) is not None]
        total = sum(there[1:], start=there[0]) if there else None
        mean[name] = None if total is None else total / (divisor or len(gradients))
    return mean


def below(gradients: Gradients, part: str) -> Gradients:
    """Those of one part, by the part's own names."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): grad for name, grad in gradients.items() if name.startswith(prefix)}


def without(gradients: Gradients, part: str) -> Gradients:
    return {name: grad for name, grad in gradients.items() if not name.startswith(f"{part}.")}


def check(seen: Gradients, right: Gradients, what: str) -> None:
    """Fail unless they are the same gradients, by the same names."""
    assert sorted(seen) == sorted(right), what
    for name, grad in right.items():
        assert_same_gradient(seen[name], grad, f"{what}, {name}", tolerance=1e-12)


def check_context(context_id: int, model: nn.Module, right: Gradients, what: str) -> None:
    check(context_gradients(context_id, model), right, what)


class Expected:
    """The gradients of every trainer in a step."""

    def __init__(self, t: Trainer, step: int, twin: nn.Module | None = None) -> None:
        found = every_ranks(twin or make_twin(), t.ranks, lambda model, rank: mean_square(model, rank, step))
        self.own = found[t.rank]
        self.mean = mean_of(found)
