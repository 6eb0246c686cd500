"""One model three times: under weft and compiled, under weft and eager, and bare.

The compiled one must have the eager one's gradients, bit for bit unless told otherwise. The bare one says
what they are without weft: the mean over the ranks of the gradients that each rank's rows give. Ranks have
different rows, so that a reduction that is missing shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import weft
from weft import compiler

WIDTH = 6
LEARNING_RATE = 0.05
WRAPS = ["replicate", "ddp"]
# Warnings come of Dynamo and Inductor, other ones with each release.
MAY_WARN = pytest.mark.filterwarnings("default")
# A rank may wait while another compiles.
LIMITS: dict[str, Any] = {"timeout": 120, "collective_timeout": 60}
LONG: dict[str, Any] = {"timeout": 150, "collective_timeout": 60}

Loss = Callable[[Any, int], Tensor]


def make_rows(rank: int, salt: int, num_rows: int = 4, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(num_rows, width, dtype=torch.float64, generator=generator)


def filled(module: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """The same parameters on every rank and at every call."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64, generator=generator) / 2)
    return module


def mlp() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
    return filled(nn.Sequential(*layers))


def square_loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return model(make_rows(rank, salt)).square().mean()


def wrapped(module: nn.Module, wrap: str, **options: Any) -> Any:
    if wrap == "ddp":
        return weft.DistributedDataParallel(module, **options)
    return weft.replicate(module, **options)


def inner(model: Any, wrap: str) -> Any:
    """The user's module: no prefix in its names."""
    model = getattr(model, "_orig_mod", model)
    return model.module if wrap == "ddp" else model


def compile_backward(graph: Any) -> Any:
    return torch.compile(graph, backend="aot_eager", fullgraph=True)


def backward_context(kind: str) -> AbstractContextManager[Any]:
    """Around backward: nothing, weft's way to trace it, or torch's."""
    match kind:
        case "plain":
            return nullcontext()
        case "weft":
            return compiler.autograd(options={"engine": "aot_eager"})
        case "torch":
            return compiled_autograd._enable(compile_backward)
        case _:
            raise ValueError(kind)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


def assert_same_gradients(
    found: nn.Module, wanted: dict[str, Tensor | None], *, is_exact: bool, what: str
) -> None:
    seen = gradients(found)
    assert list(seen) == list(wanted), f"{what}: {list(seen)} != {list(wanted)}"
    for name, right in wanted.items():
        grad = seen[name]
        if right is None or grad is None:
            assert grad is right, f"{what}, {name}: {grad} is not {right}"
            continue
        tolerance: Any = {"rtol": 0.0, "atol": 0.0} if is_exact else {}
        torch.testing.assert_close(
            grad, right, **tolerance, msg=lambda text, name=name: f"{what}, {name}: {text}"
        )


class Pair:
    """A compiled and an eager model under weft, and a bare one."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        wrap: str = "replicate",
        *,
        backend: Any = "aot_eager",
        fullgraph: bool = True,
        is_exact: bool = True,
        **options: Any,
    ) -> None:
        self.wrap = wrap
        self.is_exact = is_exact
        self.bare = make()
        self.plain = wrapped(make(), wrap, **options)
        self.under = wrapped(make(), wrap, **options)
        self.compiled: Any = torch.compile(self.under, backend=backend, fullgraph=fullgraph)
        self.num_steps = 0

    def models(self) -> list[Any]:
        return [self.bare, self.plain, self.under]

    def zero_grad(self) -> None:
        for model in self.models():
            model.zero_grad()

    def backward(
        self, salt: int, loss: Any = square_loss, *, kind: str = "plain", with_bare: bool = True
    ) -> None:
        """Add the gradients of one batch to all three."""
        loss(self.plain, salt).backward()
        value = loss(self.compiled, salt)
        with backward_context(kind):
            value.backward()
        if with_bare:
            size = dist.get_world_size()
            for rank in range(size):
                (loss(self.bare, salt, rank) / size).backward()

    def check(self, *, with_bare: bool = True, what: str = "") -> None:
        what = f"rank {dist.get_rank()}, step {self.num_steps} {what}"
        under = inner(self.under, self.wrap)
        plain = gradients(inner(self.plain, self.wrap))
        assert_same_gradients(under, plain, is_exact=self.is_exact, what=f"{what}, compiled and eager")
        if with_bare:
            wanted = gradients(self.bare)
            assert_same_gradients(under, wanted, is_exact=False, what=f"{what}, compiled and bare")

    def update(self) -> None:
        with torch.no_grad():
            for model in self.models():
                for param in model.parameters():
                    if param.grad is not None:
                        param -= LEARNING_RATE * param.grad
        self.num_steps += 1

    def step(
        self, salt: int, loss: Any = square_loss, *, kind: str = "plain", with_bare: bool = True
    ) -> None:
        self.zero_grad()
        self.backward(salt, loss, kind=kind, with_bare=with_bare)
        self.check(with_bare=with_bare)
        self.update()

    def train(self, steps: int = 3, **options: Any) -> None:
        for salt in range(steps):
            self.step(salt, **options)


def fresh() -> None:
    """Forget what was compiled before: tests share their processes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
