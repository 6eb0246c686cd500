"""The model that `weft train` trains: a byte-level transformer in three sizes.

Plain modules that know nothing of ranks. How they are spread is strategies.py's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

NUM_BYTES = 256  # a token is a byte


@dataclass(frozen=True)
class ModelSize:
    """How large a transformer is. `context` is the longest sequence that it is trained on."""

    width: int
    depth: int
    num_heads: int
    hidden: int
    context: int


SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(width=96, depth=3, num_heads=8, hidden=256, context=64),
    "small": ModelSize(width=384, depth=6, num_heads=8, hidden=1024, context=256),
    "medium": ModelSize(width=768, depth=12, num_heads=16, hidden=2048, context=512),
}


class Attention(nn.Module):
    """Causal attention. How many heads there are follows from the features: a rank may have some of them."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_width = size.width // size.num_heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.width, bias=False)
        self.value = nn.Linear(size.width, size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix (batch, time, width) over the time, each place with those before it."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change each place by itself."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then the MLP, each added to what came in."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP on (batch, time, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder over bytes: tokens (batch, time) to logits (batch, time, 256)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embed: nn.Module = nn.Embedding(NUM_BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, NUM_BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the byte that follows each byte."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(size: ModelSize, seed: int) -> Transformer:
    """A transformer with random values that depend on the seed alone: every rank makes the same one."""
    with torch.device("meta"):
        model = Transformer(size)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.dim() == 1:
            nn.init.ones_(param)
        else:
            nn.init.normal_(param, std=0.4 * param.shape[1] ** -0.5, generator=generator)
    return model


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the bytes that follow, in nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn pairs of features by an angle that grows with the time."""
    num_times, half = x.shape[-2], x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    times = torch.arange(num_times, device=x.device, dtype=torch.float32)
    angles = torch.outer(times, 1000.0 ** (-steps / half))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
