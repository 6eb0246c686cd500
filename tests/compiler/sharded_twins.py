"""A compiled model under fully_shard and an eager twin, whose gradients and parameters it must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import weft
from tests.compiler.pairs import WIDTH, filled, fresh, make_rows

LEARNING_RATE = 0.05

Shard = Callable[[nn.Module], Any]


def blocks() -> nn.Module:
    """Three blocks and a head, none of them as wide as two ranks divide."""
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return filled(nn.Sequential(*made, nn.Linear(WIDTH, 3)), dtype=torch.float32)


class Custom(nn.Module):
    """A user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh() * self.scale
        return x


def custom() -> nn.Module:
    return filled(Custom(), dtype=torch.float32)


def per_block(module: nn.Module, **options: Any) -> Any:
    for child in module.blocks if isinstance(module, Custom) else module.children():
        weft.fully_shard(child, **options)
    return weft.fully_shard(module, **options)


def whole(module: nn.Module, **options: Any) -> Any:
    return weft.fully_shard(module, **options)


def rows(salt: int) -> Tensor:
    return make_rows(dist.get_rank(), salt).float()


class Twins:
    """A compiled model and an eager one, sharded alike."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = blocks,
        shard: Shard = per_block,
        *,
        backend: Any = "aot_eager",
        fullgraph: bool = True,
        is_exact: bool = True,
    ) -> None:
        fresh()
        self.plain, self.under = shard(make()), shard(make())
        self.compiled: Any = torch.compile(self.under, backend=backend, fullgraph=fullgraph)
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in self.models()]
        self.tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
        self.num_steps = 0

    def models(self) -> list[Any]:
        return [self.plain, self.under]

    def loss(self, model: Any, salt: int) -> Tensor:
        return model(rows(salt)).float().square().mean()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, salt: int) -> None:
        for model in (self.plain, self.compiled):
            self.loss(model, salt).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_steps += 1

    def check(self) -> None:
        """Gradients and parameters are the twin's: values, dtypes, placements, and None for None."""
        found = dict(self.under.named_parameters(remove_duplicate=False))
        wanted = dict(self.plain.named_parameters(remove_duplicate=False))
        assert list(found) == list(wanted)
        for name, right in wanted.items():
            param: Any = found[name]
            what = f"rank {dist.get_rank()}, step {self.num_steps}, {name}"
            assert isinstance(param, nn.Parameter), f"{what} is a {type(param)}"
            self._compare(param, right, what)
            assert (param.grad is None) == (right.grad is None), f"{what}: {param.grad}, not {right.grad}"
            if right.grad is not None:
                self._compare(param.grad, right.grad, f"{what}, gradient")

    def _compare(self, found: Any, right: Any, what: str) -> None:
        assert (found.placements, found.shape) == (right.placements, right.shape), what
        torch.testing.assert_close(
            found.to_local(), right.to_local(), **self.tolerance, msg=lambda text: f"{what}: {text}"
        )

    def step(self, salt: int) -> None:
        self.zero_grad()
        self.backward(salt)
        self.check()
        self.update()

    def train(self, num_steps: int = 3) -> None:
        """Steps, of which those after the second must not compile anything."""
        for salt in range(num_steps):
            if salt < 2:
                self.step(salt)
            else:
                with torch.compiler.set_stance("fail_on_recompile"):
                    self.step(salt)


def assert_in_graph(num_breaks: int = 0) -> None:
    found = sum(counters["graph_break"].values())
    assert (found > 0) == (num_breaks > 0), counters["graph_break"]
