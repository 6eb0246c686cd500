"""weft.training.Checkpoints: a trainer goes on from one, with a model of one's own; torch reads it, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load

import weft
from tests.ranks import run_on
from tests.train.models import (
    MakeOptimizer,
    OddMLP,
    adamw,
    amsgrad,
    expect_close,
    full,
    mse,
    plain_sgd,
    train,
    two_groups,
)
from weft.errors import ConfigError
from weft.testing.models import MLP, BranchingMLP, KitModel, NormedMLP, TiedMLP
from weft.training import Checkpoints


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


@pytest.mark.parametrize(
    "strategies", [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "replicate")], ids="-".join
)
@run_on(threads=2, timeout=120)
def test_a_trainer_goes_on_from_a_checkpoint(strategies: tuple[str, str], tmp_path: Path) -> None:
    for model, optimizer in [
        (OddMLP, adamw),
        (OddMLP, two_groups),
        (TiedMLP, amsgrad),
        (MLP, plain_sgd),
    ]:
        goes_on(model, optimizer, strategies, tmp_path)


@run_on(threads=2, timeout=120)
def test_buffers_go_on_too(tmp_path: Path) -> None:
    goes_on(NormedMLP, adamw, ("ddp", "ddp"), tmp_path)
    goes_on(NormedMLP, plain_sgd, ("fsdp", "fsdp"), tmp_path)


@run_on(threads=2, timeout=120)
def test_parameters_without_a_gradient_are_in_a_checkpoint(tmp_path: Path) -> None:
    goes_on(BranchingMLP, adamw, ("fsdp", "fsdp"), tmp_path)


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
@run_on(threads=2, timeout=60)
def test_a_checkpoint_of_another_model_is_refused(
    strategy: str, other: type[MLP], words: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path)
    model = MLP()
    trainer = weft.Trainer(model, mse, adamw, strategy)
    train(trainer, model, range(1))
    checkpoints.save(trainer, {})
    trainer.close()
    loader = weft.Trainer(other(), mse, adamw, strategy)
    before = full(loader.module)
    with pytest.raises(ConfigError, match=words):
        checkpoints.load(loader, 1)
    after = full(loader.module)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert loader.num_steps == 0
    loader.close()


@run_on(threads=2, timeout=60)
def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    trainer = weft.Trainer(MLP(), mse, adamw)
    with pytest.raises(ConfigError, match="step-00000007"):
        Checkpoints(tmp_path).load(trainer, 7)
    trainer.close()


@pytest.mark.threads
def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    def body() -> None:
        model = MLP()
        trainer = weft.Trainer(model, mse, adamw)
        train(trainer, model, range(1))
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


@run_on(threads=1, timeout=60)
def test_torch_reads_what_weft_writes(tmp_path: Path) -> None:
    trainer = weft.Trainer(nn.Linear(4, 2), mse, adamw)
    path = Checkpoints(tmp_path).save(trainer, {})
    state = {"weight": torch.zeros(2, 4)}
    load(state, checkpoint_id=path)
    assert torch.equal(state["weight"], dict(trainer.placed.bare.named_parameters())["weight"])
    trainer.close()
