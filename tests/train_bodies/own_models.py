"""`weft.Trainer` with models that are not weft's: odd shapes, parameters that are frozen, tied or unused.

Each body runs on every rank of a world, and checks against a plain loop over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from weft import tensor_parallel as tp
from weft.testing.models import BranchingMLP, KitModel, fill_parameters, make_batches
from weft.training import Checkpoints, Strategy

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


def same_as_a_plain_loop(make: Callable[[], KitModel], optimizer: MakeOptimizer, strategy: str) -> None:
    reference = make()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    wanted = train_plainly(reference, optimizer(reference.parameters()), 4)
    model = make()
    trainer = weft.Trainer(model, mse, optimizer, strategy)
    losses = train(trainer, model, range(4))
    what = f"{make.__name__}, {optimizer.__name__}, {strategy}"
    expect_close(losses, wanted, what)
    after = full(trainer.module)
    for name, param in reference.named_parameters(remove_duplicate=False):
        assert torch.allclose(after[name], param, atol=1e-4), f"{what}: {name}"
        if not param.requires_grad:
            assert torch.equal(after[name], before[name]), f"{what}: {name} is frozen"
    trainer.close()


def goes_on(
    make: Callable[[], KitModel], optimizer: MakeOptimizer, strategies: tuple[str, str], below: Path
) -> None:
    """Broken off at step 3 and taken up by another trainer, it has the losses of one that wasn't."""
    before, after = strategies
    what = f"{make.__name__}, {optimizer.__name__}, {before} to {after}"
    model = make()
    unbroken = weft.Trainer(model, mse, optimizer, after)
    wanted = train(unbroken, model, range(6))
    unbroken.close()

    checkpoints = Checkpoints(below / "-".join([make.__name__, optimizer.__name__, *strategies]), keep=1)
    assert checkpoints.steps() == []
    model = make()
    first = weft.Trainer(model, mse, optimizer, before)
    train(first, model, range(3))
    checkpoints.save(first, {"why": what})
    first.close()
    assert checkpoints.steps() == [3]
    assert checkpoints.about(3)["why"] == what

    model = make()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()  # what is not loaded would show
    second = weft.Trainer(model, mse, optimizer, after)
    checkpoints.load(second, 3)
    assert second.num_steps == 3
    losses = train(second, model, range(3, 6))
    if before == after:
        assert losses == wanted[3:], what
    else:
        expect_close(losses, wanted[3:], what)
    # fully_shard leaves buffers to each rank, so of those only the first rank's can come back.
    if after != "fsdp" or dist.get_rank() == 0:
        for (name, value), other in zip(model.named_buffers(), unbroken.module.buffers(), strict=True):
            assert torch.allclose(value.float(), other.float(), atol=1e-5), f"{what}: buffer {name}"
    checkpoints.save(second, {})
    dist.barrier()  # rank 0 drops the old one, and that may last a little longer
    assert checkpoints.steps() == [6]
    second.close()


def unused_parameters(strategy: str) -> None:
    """A branch that no forward uses has no gradient: it stays as it was."""
    model = BranchingMLP()
    right = model.right.weight.detach().clone()
    same_as_a_plain_loop(BranchingMLP, plain_sgd, strategy)
    trainer = weft.Trainer(model, mse, plain_sgd, strategy)
    train(trainer, model, range(3))
    assert torch.equal(full(trainer.module)["right.weight"], right), strategy
    trainer.close()


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


def remote_table() -> None:
    """Strategy rpc with a module of another name than weft's own model has."""
    reference = TableMLP()
    wanted = train_plainly(reference, two_groups(reference.parameters()), 4)
    model = TableMLP()
    trainer = weft.Trainer(model, mse, two_groups, Strategy("rpc", remote="table"))
    expect_close(train(trainer, model, range(4)), wanted, "rpc")
    trainer.close()


def two_axes() -> None:
    plan = {
        "left": tp.ColwiseParallel(),
        "last": tp.RowwiseParallel(),
    }
    for name in ("ddp+tp", "fsdp+tp"):
        reference = BranchingMLP()
        del reference.right
        wanted = train_plainly(reference, plain_sgd(reference.parameters()), 4)
        model = BranchingMLP()
        del model.right
        trainer = weft.Trainer(model, mse, plain_sgd, Strategy(name, tp=2, tp_plan=plan))
        assert trainer.layout.shape[-1] == 2
        batches = list(make_batches(model, 4))
        share = trainer.layout.share_of(dist.get_rank())
        losses: list[float] = []
        for batch in batches:
            mine = batch.shard(share.index, share.count)
            losses.append(trainer.step(mine.inputs, mine.targets).scalars["loss"])
        expect_close(losses, wanted, name)
        trainer.close()
