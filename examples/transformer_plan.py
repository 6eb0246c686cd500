"""A ready plan for a transformer: tensor parallel inside, data parallel around it.

    python examples/transformer_plan.py --sequence-parallel --data-parallel fully_shard

trains a small decoder on four ranks, 2 for data by 2 for tensors, and again in this process alone, and prints
the losses of both. For a model of your own copy `block_plan` and `parallelize`, and put your names in: the
modules know nothing of ranks.

Between modules a rank has the whole (batch, time, width); with sequence_parallel its part of the time, and
norms and sums run on that. Inside attention and MLP it has all of the time, and its own heads or features.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import weft
import weft.tensor_parallel as tp

VOCAB, WIDTH, NUM_HEADS, HIDDEN, DEPTH = 96, 32, 4, 80, 2


class Attention(nn.Module):
    """Causal attention. How many heads there are follows from the width: a rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head_width = WIDTH // NUM_HEADS
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = (layer(x) for layer in (self.query, self.key, self.value))
        by_head = (one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in features)
        query, key, value = by_head  # (batch, heads of this rank, time, head width) each
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn pairs of features by an angle that grows with the time."""
    num_times, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(num_times), 1000 ** (-torch.arange(half) / half)).to(x)
    (left, right), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then the MLP, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder: tokens (batch, time) to logits (batch, time, VOCAB)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)  # the same values on every rank
        for name, param in self.named_parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.2, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def block_plan(*, sequence_parallel: bool) -> dict[str, tp.ParallelStyle]:
    """How a block is split. `between` is where its input and output lie."""
    between = Shard(1) if sequence_parallel else Replicate()
    # Made whole once for the layers that read it, which then share one sum of gradients in backward.
    read_whole = tp.PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan: dict[str, tp.ParallelStyle] = {
        "attention": read_whole,
        "attention.query": tp.ColwiseParallel(),
        "attention.key": tp.ColwiseParallel(),
        "attention.value": tp.ColwiseParallel(),
        "attention.out": tp.RowwiseParallel(output_layouts=between),
        "mlp": read_whole,
        "mlp.gate": tp.ColwiseParallel(),
        "mlp.up": tp.ColwiseParallel(),
        "mlp.down": tp.RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        plan |= {"attention_norm": tp.SequenceParallel(), "mlp_norm": tp.SequenceParallel()}
    return plan


def parallelize(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the model over a 1-D mesh. Its logits stay in shards: take the loss in loss_parallel."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, tp.ParallelStyle] = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": tp.ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence_parallel:
        plan["norm"] = tp.SequenceParallel()
    for name, style in block_plan(sequence_parallel=sequence_parallel).items():
        plan[f"blocks.*.{name}"] = style
    tp.parallelize_module(model, mesh, plan)


def share_data(model: Transformer, mesh: DeviceMesh, *, by: str) -> None:
    """Put data parallel around it, over another axis of the mesh: "replicate" or "fully_shard"."""
    if by == "replicate":
        weft.replicate(model, device_mesh=mesh)
    else:
        for module in (*model.blocks, model):
            weft.fully_shard(module, mesh=mesh)


def make_batches(num_steps: int) -> list[torch.Tensor]:
    """Sequences with a rule that can be learned: each token is the one before plus 7."""
    starts = torch.randint(VOCAB, (num_steps, 8, 1), generator=torch.Generator().manual_seed(1))
    return list((starts + 7 * torch.arange(17)) % VOCAB)


def train(model: Transformer, batches: list[torch.Tensor]) -> list[float]:
    """Train a step a batch, and give the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        with tp.loss_parallel():  # no rank ever has all the logits
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        weft.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_mesh(num_steps: int, sequence_parallel: bool, data_parallel: str) -> list[float]:
    """What each of four ranks runs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer()
    parallelize(model, mesh["tp"], sequence_parallel=sequence_parallel)  # first inside,
    share_data(model, mesh["dp"], by=data_parallel)  # then around
    return train(model, [batch.chunk(2)[mesh.get_local_rank("dp")] for batch in make_batches(num_steps)])


def main() -> None:
    """Compare four ranks with one process."""
    parser = argparse.ArgumentParser(description="Train a transformer on 2 x 2 ranks, and on one.")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--data-parallel", choices=["replicate", "fully_shard"], default="replicate")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    arguments = (options.steps, options.sequence_parallel, options.data_parallel)
    split = torch.tensor(weft.launch(train_on_mesh, ranks=4, args=arguments)).mean(dim=0)
    alone = torch.tensor(train(Transformer(), make_batches(options.steps)))
    print("step  four ranks    alone")
    for step, (seen, wanted) in enumerate(zip(split, alone, strict=True)):
        print(f"{step:4}  {seen:10.5f}  {wanted:7.5f}")
    torch.testing.assert_close(split, alone, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
