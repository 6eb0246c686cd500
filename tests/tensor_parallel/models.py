"""Models of the tests of tensor parallelism, and plans for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.tensor_parallel.twins import filled

WIDTH, HIDDEN = 8, 12


class MLP(nn.Module):
    """Two layers that a plan splits: the first by its outputs, the second by its inputs."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.net1 = nn.Linear(width, hidden, bias=bias)
        self.net2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net2(torch.tanh(self.net1(rows)))


class Stacked(nn.Module):
    """MLPs under names with numbers."""

    def __init__(self, depth: int = 2, **sizes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(**sizes) for _ in range(depth))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + layer(rows)
        return rows


def mlp_plan(tp: Any, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}net1": tp.ColwiseParallel(), f"{prefix}net2": tp.RowwiseParallel()}


def gathering_plan(tp: Any, prefix: str = "") -> dict[str, Any]:
    """The MLP on rows that are cut: gathered in front, dealt out again behind."""
    return {
        f"{prefix}net1": tp.ColwiseParallel(input_layouts=Shard(0)),
        f"{prefix}net2": tp.RowwiseParallel(output_layouts=Shard(0)),
    }


class Net(nn.Module):
    """Four layers in a row, the first of them checkpointed or not."""

    def __init__(self, width: int = WIDTH, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.fc3, self.fc4 = nn.Linear(width, width), nn.Linear(width, width)
        self.is_checkpointed = is_checkpointed
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            rows = checkpoint(self.fc1, rows, use_reentrant=False)
        else:
            rows = self.fc1(rows)
        return self.fc4(self.fc3(self.fc2(rows)))


def net_plan(tp: Any) -> dict[str, Any]:
    return {
        "fc1": tp.ColwiseParallel(),
        "fc2": tp.RowwiseParallel(),
        "fc3": tp.ColwiseParallel(),
        "fc4": tp.RowwiseParallel(),
    }


class Attention(nn.Module):
    """Heads, however many this rank has of them."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (part.shape[-1] // self.head_width, self.head_width)).transpose(1, 2)
            for part in (self.query(hidden), self.key(hidden), self.value(hidden))
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.project(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, width // 4)
        self.mlp = MLP(width, 2 * width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Language(nn.Module):
    """Tokens in, logits out; the head's weight may be the embedding's."""

    def __init__(
        self,
        vocabulary: int = 12,
        width: int = WIDTH,
        blocks: int = 1,
        is_tied: bool = False,
        is_checkpointed: bool | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.is_checkpointed = is_checkpointed  # None: it isn't; else whether reentrant
        filled(self)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            if self.is_checkpointed is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.is_checkpointed)
        return self.head(self.norm(hidden))


def language_plan(tp: Any) -> dict[str, Any]:
    """Copies between the layers."""
    return {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.[qkv]*": tp.ColwiseParallel(),
        "blocks.*.attention.project": tp.RowwiseParallel(),
        "blocks.*.mlp.net1": tp.ColwiseParallel(),
        "blocks.*.mlp.net2": tp.RowwiseParallel(),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan(tp: Any) -> dict[str, Any]:
    """The sequence is cut between the layers."""
    gather = tp.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    return {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": tp.SequenceParallel(use_local_output=True),
        "blocks.*.attention": gather,
        "blocks.*.attention.[qkv]*": tp.ColwiseParallel(),
        "blocks.*.attention.project": tp.RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm2": tp.SequenceParallel(use_local_output=True),
        "blocks.*.mlp": gather,
        "blocks.*.mlp.net1": tp.ColwiseParallel(),
        "blocks.*.mlp.net2": tp.RowwiseParallel(output_layouts=Shard(1)),
        "norm": tp.SequenceParallel(use_local_output=True),
        "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def next_token_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Predict each token from those before it; the mean over rows and places."""
    logits = model(words[:, :-1])
    assert not isinstance(logits, DTensor)
    return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
