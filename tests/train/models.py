"""Models that are not weft's own for `weft.Trainer`, optimizers, and the plain loop to check against."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from weft.testing.models import KitModel, fill_parameters, make_batches

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
mse = nn.functional.mse_loss

# A loss of about 1 in float32, and four updates: see runs.SAME.
SAME = 1e-5


class OddMLP(KitModel):
    """Sizes that no number of ranks divides, a parameter of one element, and a first layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.scale = nn.Parameter(torch.empty(1))
        self.blocks = nn.ModuleList([nn.Linear(13, 13, bias=False), nn.Linear(13, 13)])
        self.last = nn.Linear(13, 8)
        fill_parameters(self, seed=3)
        self.first.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, 8, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.scale
        return self.last(hidden)


class TableMLP(KitModel):
    """A table of rows below a layer; each of the inputs is one row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.last = nn.Linear(8, 8)
        fill_parameters(self, seed=5)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(11, (rows,), generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.table(inputs)))


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def plain_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def two_groups(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(params)
    return torch.optim.SGD(
        [
            {"params": [param for param in given if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in given if param.dim() <= 1], "lr": 0.05, "nesterov": True},
        ],
        lr=0.1,
        momentum=0.9,
    )


def amsgrad(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, amsgrad=True)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a spread model, whole, by their own names. All ranks call."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def train(trainer: weft.Trainer, model: KitModel, steps: range) -> list[float]:
    batches = [batch.shard() for batch in make_batches(model, steps.stop)]
    return [trainer.step(batches[step].inputs, batches[step].targets).scalars["loss"] for step in steps]


def train_plainly(model: KitModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses: list[float] = []
    for batch in make_batches(model, steps):
        optimizer.zero_grad()
        loss = mse(model(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def expect_close(seen: list[float], wanted: list[float], what: str) -> None:
    assert len(seen) == len(wanted), what
    far = [abs(a - b) for a, b in zip(seen, wanted, strict=True)]
    assert max(far) < SAME, f"{what}: {seen} and not {wanted}"
