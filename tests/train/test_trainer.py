"""weft.Trainer with models of one's own, against a plain loop over the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on
from tests.train.models import (
    MakeOptimizer,
    OddMLP,
    TableMLP,
    adamw,
    amsgrad,
    expect_close,
    full,
    mse,
    plain_sgd,
    train,
    train_plainly,
    two_groups,
)
from weft import tensor_parallel as tp
from weft.data_parallel import DistributedDataParallel
from weft.errors import ConfigError
from weft.testing.models import MLP, BranchingMLP, KitModel, TiedMLP, make_batches
from weft.training import Strategy

pytestmark = run_on(threads=2, timeout=60)

DATA_PARALLEL = ["ddp", "replicate", "fsdp", "hsdp"]


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


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
def test_models_of_ones_own_train_as_in_a_plain_loop(strategy: str) -> None:
    for model, optimizer in [
        (OddMLP, adamw),
        (OddMLP, two_groups),
        (MLP, amsgrad),
        (TiedMLP, plain_sgd),
    ]:
        same_as_a_plain_loop(model, optimizer, strategy)


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
def test_parameters_that_no_forward_uses_stay_as_they_are(strategy: str) -> None:
    """A branch that no forward uses has no gradient: it stays as it was."""
    model = BranchingMLP()
    right = model.right.weight.detach().clone()
    same_as_a_plain_loop(BranchingMLP, plain_sgd, strategy)
    trainer = weft.Trainer(model, mse, plain_sgd, strategy)
    train(trainer, model, range(3))
    assert torch.equal(full(trainer.module)["right.weight"], right), strategy
    trainer.close()


def test_a_remote_table_of_ones_own() -> None:
    """Strategy rpc with a module of another name than weft's own model has."""
    reference = TableMLP()
    wanted = train_plainly(reference, two_groups(reference.parameters()), 4)
    model = TableMLP()
    trainer = weft.Trainer(model, mse, two_groups, Strategy("rpc", remote="table"))
    expect_close(train(trainer, model, range(4)), wanted, "rpc")
    trainer.close()


@run_on(threads=4, timeout=60)
def test_a_plan_of_ones_own_on_two_axes() -> None:
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


def test_the_figures_of_a_step() -> None:
    trainer = weft.Trainer(MLP(), mse, plain_sgd)
    rank = dist.get_rank()
    inputs = torch.full((4, 8), float(rank))
    with torch.no_grad():
        mine = mse(MLP()(inputs), torch.zeros(4, 8))
        other = mse(MLP()(torch.full((4, 8), float(1 - rank))), torch.zeros(4, 8))
    figures = trainer.step(inputs, torch.zeros(4, 8))
    assert figures.scalars["loss"] == pytest.approx((mine + other).item() / 2, abs=1e-6)
    assert figures.secs > 0
    assert figures.secs == pytest.approx(figures.compute_secs + figures.wait_secs)
    assert figures.comm_secs >= 0
    assert figures.memory_bytes > 1 << 20
    assert trainer.num_steps == 1
    trainer.close()


def test_the_module_is_a_ddp_module_or_ones_own() -> None:
    model = MLP()
    trainer = weft.Trainer(model, mse, plain_sgd)
    assert isinstance(trainer.module, DistributedDataParallel)
    assert trainer.module.module is model
    trainer.close()
    for strategy in ("replicate", "fsdp", "hsdp"):
        model = MLP()
        trainer = weft.Trainer(model, mse, plain_sgd, strategy)
        assert trainer.module is model
        trainer.close()


def test_each_child_of_a_module_list_is_a_group() -> None:
    model = OddMLP()
    trainer = weft.Trainer(model, mse, plain_sgd, "fsdp")
    with weft.record() as events:
        train(trainer, model, range(1))
    gathered = {event.label for event in events if event.op.startswith("all_gather")}
    assert {"blocks.0", "blocks.1"} < gathered
    assert len(gathered) == 3, "and one of what is left"
    trainer.close()


def test_uneven_ranks() -> None:
    for strategy in ("ddp", "replicate", "fsdp", Strategy("hsdp", shard=1), Strategy("hsdp", shard=2)):
        model = MLP()
        trainer = weft.Trainer(model, mse, plain_sgd, strategy)
        with trainer.uneven():
            losses = train(trainer, model, range(4 - 2 * dist.get_rank()))
        reference = MLP()
        wanted = train_plainly(reference, plain_sgd(reference.parameters()), 3)
        expect_close(losses[:2], wanted[:2], str(strategy))
        assert len(losses) == 4 - 2 * dist.get_rank()
        trainer.close()


@pytest.mark.parametrize(
    ("strategy", "keywords", "words"),
    [
        ("magic", {}, "magic"),
        ("ddp", {"hook": "zip"}, "zip"),
        ("tp", {"hook": "bf16"}, "hook bf16"),
        ("rpc", {"compile": True}, "compile"),
        (Strategy("ddp", tp=2), {}, "tp"),
        (Strategy("ddp+tp", tp=3), {}, "3"),
        (Strategy("hsdp", shard=3), {}, "3"),
        (Strategy("rpc", remote="nowhere"), {}, "nowhere"),
        (Strategy("tp"), {}, "tp_plan"),
    ],
    ids=str,
)
def test_what_cannot_be_leaves_the_model_alone(
    strategy: str | Strategy, keywords: dict[str, Any], words: str
) -> None:
    model = BranchingMLP()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(ConfigError, match=words):
        weft.Trainer(model, mse, plain_sgd, strategy, **keywords)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model) is BranchingMLP


@run_on(threads=1, timeout=60)
def test_a_mean_of_one_rank_is_its_own(tmp_path: Path) -> None:
    model = MLP()
    trainer = weft.Trainer(model, mse, plain_sgd, "fsdp", record=tmp_path)
    (batch,) = make_batches(model, 1)
    with torch.no_grad():
        wanted = mse(MLP()(batch.inputs), batch.targets).item()
    figures = trainer.step(batch.inputs, batch.targets)
    trainer.close()
    assert figures.scalars["loss"] == pytest.approx(wanted, abs=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.jsonl", "run.json"]
