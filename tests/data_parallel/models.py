"""Models of which a forward uses a part: branches, or tables with sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tests.data_parallel.twins import WIDTH, Loss, filled

WORDS, WORD_WIDTH = 9, 4


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


class Embedded(nn.Module):
    """Two sparse tables, one dense layer; `forward(tokens, "ab")` says which tables to look into."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(WORDS, WORD_WIDTH, sparse=True)
        self.b = nn.EmbeddingBag(WORDS, WORD_WIDTH, mode="sum", sparse=True)
        self.last = nn.Linear(WORD_WIDTH, 3)
        filled(self)

    def forward(self, tokens: torch.Tensor, tables: str) -> torch.Tensor:
        hidden = torch.zeros(len(tokens), WORD_WIDTH, dtype=torch.float64)
        if "a" in tables:
            hidden = hidden + self.a(tokens).sum(1)
        if "b" in tables:
            hidden = hidden + self.b(tokens)
        return self.last(torch.tanh(hidden))


def tokens_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(WORDS - rank, (3, 2), generator=generator)
