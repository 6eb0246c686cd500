"""Models of which a forward uses a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tests.data_parallel_bodies.twins import WIDTH, Loss, filled


class Branches(nn.Module):
    """`forward(rows, "ab")` runs branches a and b, then the head; the others stay without gradient."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.head = nn.Linear(WIDTH, WIDTH)
        filled(self)

    def forward(self, rows: torch.Tensor, names: Iterable[str]) -> torch.Tensor:
        hidden = rows
        for name in names:
            hidden = torch.tanh(self.branches[name](hidden))
        return self.head(hidden)


def loss_by_rank(*names: str) -> Loss:
    """A loss whose rank r runs the branches names[r]; ranks past the end run the last."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows, names[min(rank, len(names) - 1)]).square().mean()

    return loss
