"""weft.Trainer and Checkpoints with models of one's own, on ranks that are threads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.train_bodies import own_models as own
from weft.data_parallel import DistributedDataParallel
from weft.errors import ConfigError
from weft.testing import on_ranks
from weft.testing.models import MLP, BranchingMLP, NormedMLP, TiedMLP, make_batches
from weft.training import Checkpoints, Strategy

DATA_PARALLEL = ["ddp", "replicate", "fsdp", "hsdp"]


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
@on_ranks(2)
def test_models_of_ones_own_train_as_in_a_plain_loop(strategy: str) -> None:
    for model, optimizer in [
        (own.OddMLP, own.adamw),
        (own.OddMLP, own.two_groups),
        (MLP, own.amsgrad),
        (TiedMLP, own.plain_sgd),
    ]:
        own.same_as_a_plain_loop(model, optimizer, strategy)


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
@on_ranks(2)
def test_parameters_that_no_forward_uses_stay_as_they_are(strategy: str) -> None:
    own.unused_parameters(strategy)


@on_ranks(2)
def test_a_remote_table_of_ones_own() -> None:
    own.remote_table()


@on_ranks(4)
def test_a_plan_of_ones_own_on_two_axes() -> None:
    own.two_axes()


@pytest.mark.parametrize(
    "strategies", [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "replicate")], ids="-".join
)
def test_a_trainer_goes_on_from_a_checkpoint(strategies: tuple[str, str], tmp_path: Path) -> None:
    def body() -> None:
        for model, optimizer in [
            (own.OddMLP, own.adamw),
            (own.OddMLP, own.two_groups),
            (TiedMLP, own.amsgrad),
            (MLP, own.plain_sgd),
        ]:
            own.goes_on(model, optimizer, strategies, tmp_path)

    weft.launch(body, ranks=2, kind="thread", timeout=120)


def test_buffers_go_on_too(tmp_path: Path) -> None:
    def body() -> None:
        own.goes_on(NormedMLP, own.adamw, ("ddp", "ddp"), tmp_path)
        own.goes_on(NormedMLP, own.plain_sgd, ("fsdp", "fsdp"), tmp_path)

    weft.launch(body, ranks=2, kind="thread", timeout=120)


def test_parameters_without_a_gradient_are_in_a_checkpoint(tmp_path: Path) -> None:
    def body() -> None:
        own.goes_on(BranchingMLP, own.adamw, ("fsdp", "fsdp"), tmp_path)

    weft.launch(body, ranks=2, kind="thread", timeout=120)


@on_ranks(2)
def test_the_figures_of_a_step() -> None:
    trainer = weft.Trainer(MLP(), own.mse, own.plain_sgd)
    rank = dist.get_rank()
    inputs = torch.full((4, 8), float(rank))
    with torch.no_grad():
        mine = own.mse(MLP()(inputs), torch.zeros(4, 8))
        other = own.mse(MLP()(torch.full((4, 8), float(1 - rank))), torch.zeros(4, 8))
    figures = trainer.step(inputs, torch.zeros(4, 8))
    assert figures.scalars["loss"] == pytest.approx((mine + other).item() / 2, abs=1e-6)
    assert figures.secs > 0
    assert figures.secs == pytest.approx(figures.compute_secs + figures.wait_secs)
    assert figures.comm_secs >= 0
    assert figures.memory_bytes > 1 << 20
    assert trainer.num_steps == 1
    trainer.close()


@on_ranks(2)
def test_the_module_is_a_ddp_module_or_ones_own() -> None:
    model = MLP()
    trainer = weft.Trainer(model, own.mse, own.plain_sgd)
    assert isinstance(trainer.module, DistributedDataParallel)
    assert trainer.module.module is model
    trainer.close()
    for strategy in ("replicate", "fsdp", "hsdp"):
        model = MLP()
        trainer = weft.Trainer(model, own.mse, own.plain_sgd, strategy)
        assert trainer.module is model
        trainer.close()


@on_ranks(2)
def test_each_child_of_a_module_list_is_a_group() -> None:
    model = own.OddMLP()
    trainer = weft.Trainer(model, own.mse, own.plain_sgd, "fsdp")
    with weft.record() as events:
        own.train(trainer, model, range(1))
    gathered = {event.label for event in events if event.op.startswith("all_gather")}
    assert {"blocks.0", "blocks.1"} < gathered
    assert len(gathered) == 3, "and one of what is left"
    trainer.close()


@on_ranks(2)
def test_uneven_ranks() -> None:
    for strategy in ("ddp", "replicate", "fsdp", Strategy("hsdp", shard=1), Strategy("hsdp", shard=2)):
        model = MLP()
        trainer = weft.Trainer(model, own.mse, own.plain_sgd, strategy)
        with trainer.uneven():
            losses = own.train(trainer, model, range(4 - 2 * dist.get_rank()))
        reference = MLP()
        wanted = own.train_plainly(reference, own.plain_sgd(reference.parameters()), 3)
        own.expect_close(losses[:2], wanted[:2], str(strategy))
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
@on_ranks(2)
def test_what_cannot_be_leaves_the_model_alone(
    strategy: str | Strategy, keywords: dict[str, Any], words: str
) -> None:
    model = BranchingMLP()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(ConfigError, match=words):
        weft.Trainer(model, own.mse, own.plain_sgd, strategy, **keywords)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model) is BranchingMLP


class Wider(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)


class Shorter(MLP):
    def __init__(self) -> None:
        super().__init__(num_layers=2)


class Thicker(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Linear(9, 8)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("other", "words"), [(Wider, "more"), (Shorter, r"layers\.2"), (Thicker, r"layers\.1")]
)
def test_a_checkpoint_of_another_model_is_refused(
    strategy: str, other: type[MLP], words: str, tmp_path: Path
) -> None:
    def body() -> None:
        checkpoints = Checkpoints(tmp_path)
        model = MLP()
        trainer = weft.Trainer(model, own.mse, own.adamw, strategy)
        own.train(trainer, model, range(1))
        checkpoints.save(trainer, {})
        trainer.close()
        loader = weft.Trainer(other(), own.mse, own.adamw, strategy)
        before = own.full(loader.module)
        with pytest.raises(ConfigError, match=words):
            checkpoints.load(loader, 1)
        after = own.full(loader.module)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert loader.num_steps == 0
        loader.close()

    weft.launch(body, ranks=2, kind="thread", timeout=60)


@on_ranks(2)
def test_a_checkpoint_that_is_not_there() -> None:
    with tempfile.TemporaryDirectory() as directory:
        trainer = weft.Trainer(MLP(), own.mse, own.adamw)
        with pytest.raises(ConfigError, match="step-00000007"):
            Checkpoints(directory).load(trainer, 7)
        trainer.close()


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    def body() -> None:
        model = MLP()
        trainer = weft.Trainer(model, own.mse, own.adamw)
        own.train(trainer, model, range(1))
        checkpoints = Checkpoints(tmp_path / "saved")
        for why in ("first", "again"):
            path = checkpoints.save(trainer, {"why": why})
            assert path.name == "step-00000001"
        assert checkpoints.steps() == [1]
        assert checkpoints.about(1) == {"why": "again"}
        trainer.close()

    weft.launch(body, ranks=2, kind="thread", timeout=60)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000001"]


def test_what_else_is_in_a_directory_is_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing").steps() == []
    for name in ("step-00000012", "step-00000003", "step-3", "notes", "step-00000004.tmp", "xstep-00000005"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).steps() == [3, 12]
    with pytest.raises(ConfigError, match="keep"):
        Checkpoints(tmp_path, keep=0)


@on_ranks(1)
def test_a_mean_of_one_rank_is_its_own() -> None:
    model = MLP()
    with tempfile.TemporaryDirectory() as directory:
        trainer = weft.Trainer(model, own.mse, own.plain_sgd, "fsdp", record=directory)
        (batch,) = make_batches(model, 1)
        with torch.no_grad():
            wanted = own.mse(MLP()(batch.inputs), batch.targets).item()
        figures = trainer.step(batch.inputs, batch.targets)
        trainer.close()
        assert figures.scalars["loss"] == pytest.approx(wanted, abs=1e-6)
        assert sorted(path.name for path in Path(directory).iterdir()) == ["rank-00000.jsonl", "run.json"]
