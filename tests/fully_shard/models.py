"""Models of the tests of fully_shard, and ways to shard them: bottom-up, a group for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.data_parallel.twins import WIDTH, Loss, filled
from weft import fully_shard


def by_layer(model: nn.Module, **options: Any) -> None:
    """A group for each child that has parameters, then one for what is left."""
    for child in model.children():
        targets = child if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
        targets = targets.values() if isinstance(targets, nn.ModuleDict) else targets
        for target in targets:
            if any(True for _ in target.parameters()):
                fully_shard(target, **options)
    fully_shard(model, **options)


def as_whole(model: nn.Module, **options: Any) -> None:
    """One group for all."""
    fully_shard(model, **options)


def every_module(model: nn.Module, **options: Any) -> None:
    """A group for each module that has parameters of its own, from the leaves up."""
    for module in reversed(list(model.modules())):
        has_own = any(True for _ in module.parameters(recurse=False))
        if module is not model and has_own:
            fully_shard(module, **options)
    fully_shard(model, **options)


def net(depth: int = 3, width: int = WIDTH) -> Any:
    """Layers in a row; filled, float64."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return filled(nn.Sequential(*layers[:-1]))


class Experts(nn.Module):
    """`forward(rows, "ab")` runs experts a and b, in that order; the others are not used."""

    def __init__(self, names: str = "abc", has_head: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: Expert() for name in names})
        self.head = nn.Linear(WIDTH, WIDTH) if has_head else None
        filled(self)

    def forward(self, rows: torch.Tensor, names: Iterable[str]) -> torch.Tensor:
        hidden = rows
        for name in names:
            hidden = hidden + self.experts[name](hidden)
        return hidden if self.head is None else self.head(hidden)


def loss_by_rank(*names: str) -> Loss:
    """Rank r runs the experts names[r]; ranks past the end begin again."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        # The input needs a gradient, so that there is a backward even where no expert runs.
        return model(rows.clone().requires_grad_(), names[rank % len(names)]).square().mean()

    return loss


class Expert(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(rows)))


class Reader(nn.Module):
    """An image tower that text-only batches leave alone, in front of a text model."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.text = Expert()
        self.head = nn.Linear(WIDTH, 2)
        filled(self)

    def forward(self, rows: torch.Tensor, has_image: bool) -> torch.Tensor:
        hidden = self.text(rows)
        if has_image:
            hidden = hidden + self.tower(rows)
        return self.head(torch.tanh(hidden))


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 1)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cells(rows.unsqueeze(1).repeat(1, 3, 1))
        return self.head(hidden[:, -1])


class Language(nn.Module):
    """Tokens in, logits out; the head's weight is the embedding's. An odd vocabulary shards unevenly."""

    def __init__(self, vocabulary: int = 11, width: int = 6, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        filled(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Attention and an MLP beside shortcuts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # No bias: that of the keys has no gradient but rounding, which Adam blows up to full steps.
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(hidden)).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended)
        return hidden + self.down(functional.gelu(self.up(hidden)))


def make_tokens(seed: int, vocabulary: int = 11, rows: int = 8, length: int = 7) -> torch.Tensor:
    """Tokens for all ranks, the same on each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, length), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """Predict each token from those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))
