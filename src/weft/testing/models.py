"""Small models and their batches, the same on every rank, in every process and with every seed's repeat.

Parameters come from a generator of their own: thread-ranks share torch's global one, so what they
draw from it depends on who comes first. Each model stands for one way in which strategies go wrong.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from weft.errors import ConfigError

_WIDTH = 8
_VOCABULARY = 16
_NUM_TOKENS = 6


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and what it should make of them; row i of one belongs to row i of the other."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def shard(self, rank: int | None = None, num_ranks: int | None = None) -> Batch:
        """The rows of one rank, the calling one unless given; all of them in a world of one.

        Equal parts only: the mean of the ranks' mean losses is then the whole batch's.
        """
        if num_ranks is None:
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        if len(self.inputs) % num_ranks:
            raise ConfigError(
                f"Batch.shard: {len(self.inputs)} rows can't be dealt evenly to {num_ranks} ranks. "
                f"Make batches with a multiple of that many rows."
            )
        return Batch(self.inputs.chunk(num_ranks)[rank], self.targets.chunk(num_ranks)[rank])


class KitModel(nn.Module, ABC):
    """A model that knows what its inputs look like. Its output has the shape (rows, *output_shape)."""

    output_shape: tuple[int, ...] = (_WIDTH,)

    @abstractmethod
    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Random inputs."""


def make_batches(model: KitModel, num_batches: int, rows: int = 8, seed: int = 1) -> Iterator[Batch]:
    """Batches that fit the model, the same for the same seed; each rank takes its `shard()` of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        inputs = model.make_inputs(rows, generator)
        yield Batch(inputs, torch.randn(rows, *model.output_shape, generator=generator))


def fill_parameters(module: nn.Module, seed: int) -> None:
    """Give every parameter values of its own, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.0 / math.sqrt(max(1, parameter.shape[-1] if parameter.dim() > 1 else 16))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale
            parameter.copy_(drawn)


class MLP(KitModel):
    """Linear layers and nothing else."""

    def __init__(self, num_layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers))
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of numbers."""
        return torch.randn(rows, _WIDTH, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class NormedMLP(KitModel):
    """With BatchNorm: buffers that training changes, one of them an integer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.last = nn.Linear(_WIDTH, _WIDTH)
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of numbers."""
        return torch.randn(rows, _WIDTH, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class TiedMLP(KitModel):
    """One weight under two names, used twice in a forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)
        self.outer = nn.Linear(_WIDTH, _WIDTH)
        self.outer.weight = self.inner.weight
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of numbers."""
        return torch.randn(rows, _WIDTH, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(inputs)))


class BranchingMLP(KitModel):
    """Two branches of which a forward uses one; set `branch` by rank or step to make ranks differ."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.branch = "left"
        self.left = nn.Linear(_WIDTH, _WIDTH)
        self.right = nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, _WIDTH)
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of numbers."""
        return torch.randn(rows, _WIDTH, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        used = self.left if self.branch == "left" else self.right
        return self.last(torch.tanh(used(inputs)))


class SparseBag(KitModel):
    """An EmbeddingBag with sparse gradients below a dense layer."""

    def __init__(self, sparse: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(_VOCABULARY, _WIDTH, mode="sum", sparse=sparse)
        self.last = nn.Linear(_WIDTH, _WIDTH)
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of tokens."""
        return torch.randint(_VOCABULARY, (rows, _NUM_TOKENS), generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.bag(inputs)))


class TransformerBlock(nn.Module):
    """Causal attention and an MLP, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(_WIDTH)
        # Without a bias: that of the keys has no gradient but rounding, which Adam blows up to full steps.
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, num_tokens, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        heads = mixed.view(rows, num_tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(rows, num_tokens, width))
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class TinyTransformer(KitModel):
    """Tokens in, logits out, the embedding's weight being the head's too."""

    output_shape = (_NUM_TOKENS, _VOCABULARY)

    def __init__(self, num_blocks: int = 2, num_heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Parameter(torch.empty(_NUM_TOKENS, _WIDTH))
        self.blocks = nn.ModuleList(TransformerBlock(num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        fill_parameters(self, seed)

    def make_inputs(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Rows of tokens."""
        return torch.randint(_VOCABULARY, (rows, _NUM_TOKENS), generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))
