"""State dicts of sharded models: names, shards, checkpoints into other worlds, full ones from rank 0."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from tests.fully_shard.models import Language, as_whole, every_module, make_tokens, next_token_loss
from tests.fully_shard.twins import Twin, assert_is_shard
from tests.ranks import run_on
from weft.fsdp import full_state_dict, load_full_state_dict
from weft.tensors import local_of

pytestmark = run_on(threads=(2, 4))

VOCABULARY = 11


class Model(Language):
    """Tied weights, uneven shards, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(VOCABULARY)
        self.register_buffer("counts", torch.arange(5, dtype=torch.float64) + seed)
        for param in self.parameters():
            param.data.add_(seed)


def trained(single: nn.Module, steps: int = 2) -> nn.Module:
    """What the tests save: the same in every world, since the batches are."""
    optimizer = torch.optim.Adam(single.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        next_token_loss(single, make_tokens(step)).backward()
        optimizer.step()
    return single


def assert_holds(model: nn.Module, right: nn.Module, tolerance: float = 1e-9) -> None:
    """The sharded model is `right`, this rank's part of it."""
    wanted = right.state_dict()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            assert_is_shard(tensor, wanted[name], name, tolerance)
        else:
            assert torch.equal(tensor, wanted[name]), name


def test_names_and_shards() -> None:
    """Unchanged names in unchanged order; the values are the shards themselves, without a collective."""
    for wrap in (by_blocks, as_whole, every_module):
        single, model = Model(), Model()
        if wrap is every_module:  # tied weights belong into one group
            for each in (single, model):
                each.head.weight = nn.Parameter(each.embedding.weight.detach() + 1)
        wrap(model)
        for run_first in (False, True):
            if run_first:
                next_token_loss(model, make_tokens(0)).backward()
            with weft.record() as events:
                state = model.state_dict()
            assert events == []
            assert list(state) == list(single.state_dict())
            assert_holds(model, single, 0.0)
            params: Any = dict(model.named_parameters(remove_duplicate=False))
            for name, tensor in state.items():
                if name in params:
                    assert tensor.to_local().data_ptr() == params[name].to_local().data_ptr()
            for name, tensor in copy.deepcopy(state).items():
                copied, own = local_of(tensor), local_of(state[name])
                assert torch.equal(copied, own), name
                assert copied.data_ptr() != own.data_ptr() or own.numel() == 0, name
            kept = model.state_dict(keep_vars=True)
            assert all(kept[name] is param for name, param in params.items())


def test_loaded_back() -> None:
    """load_state_dict of shards; parameters stay the same objects, and training goes on."""
    twin = Twin(Model(), by_blocks)
    for step in range(2):
        twin.step(make_tokens(step), next_token_loss)
    saved = {name: tensor.detach().clone() for name, tensor in twin.sharded.state_dict().items()}
    right = {name: tensor.clone() for name, tensor in twin.single.state_dict().items()}
    before = [id(param) for param in twin.sharded.parameters()]
    twin.step(make_tokens(7), next_token_loss)
    twin.sharded.load_state_dict(saved)
    twin.single.load_state_dict(right)
    assert [id(param) for param in twin.sharded.parameters()] == before
    for step in range(2):
        twin.step(make_tokens(step), next_token_loss)


def by_blocks(model: Any, **options: Any) -> None:
    for block in model.blocks:
        as_whole(block, **options)
    as_whole(model, **options)


def test_state_after_forward() -> None:
    """Between forward and backward, with parameters gathered, too."""
    model: Any = Model()
    single = Model()
    by_blocks(model, reshard_after_forward=True)
    model.set_reshard_after_forward(True)
    loss = next_token_loss(model, make_tokens(0))
    assert_holds(model, single, 0.0)
    loss.backward()
    assert_holds(model, single, 0.0)


def save(path: str) -> None:
    """Model and optimizer, as a checkpoint."""
    model = Model()
    by_blocks(model)
    right = trained(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        next_token_loss(model, make_tokens(step)).backward()  # all rows on every rank: the mean is the same
        optimizer.step()
    assert_holds(model, right)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def test_full_through_torch() -> None:
    """torch's own functions for full state dicts, from and to a sharded model."""
    model, right = Model(), Model(seed=3)
    by_blocks(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, right.state_dict(), options=options)
    assert_holds(model, right, 0.0)
    state = get_model_state_dict(model, options=options)
    assert all(torch.equal(state[name], tensor) for name, tensor in right.state_dict().items())


def test_full_from_rank_0() -> None:
    model, right = Model(seed=2), Model(seed=2)
    by_blocks(model)
    for cpu_offload in (True, False):
        state = full_state_dict(model, cpu_offload=cpu_offload)
        if dist.get_rank() == 0:
            assert list(state) == list(right.state_dict())
            for name, tensor in right.state_dict().items():
                assert type(state[name]) is torch.Tensor
                assert torch.equal(state[name], tensor), name
        else:
            assert state == {}
    everywhere = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(everywhere[name], tensor) for name, tensor in right.state_dict().items())
    next_token_loss(model, make_tokens(0)).backward()


def test_full_into_a_sharded_model() -> None:
    """Rank 0's plain state dict reaches every shard; the others have None."""
    right = Model(seed=4)
    model = Model()
    by_blocks(model)
    before = [id(param) for param in model.parameters()]
    load_full_state_dict(model, right.state_dict() if dist.get_rank() == 0 else None)
    assert_holds(model, right, 0.0)
    assert [id(param) for param in model.parameters()] == before
    assert model.head.weight is model.embedding.weight


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("checkpoint") / "two")
    weft.launch(save, args=(path,), ranks=2, kind="thread", timeout=30, collective_timeout=10)
    return path


@run_on(threads=2, layout=["the same", "other dim", "one group"])
@run_on(threads=3, layout=["the same"])
@run_on(threads=4, layout=["the same", "hybrid"])
def test_a_checkpoint_is_loaded_into_another_world(checkpoint: str, layout: str) -> None:
    """Into a model that is sharded otherwise, and go on as if nothing had been."""
    model, right = Model(seed=5), trained(Model(), steps=3)
    options: dict[str, Any] = {}
    if layout == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == "other dim":
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    (as_whole if layout == "one group" else by_blocks)(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_holds(model, trained(Model()))
    next_token_loss(model, make_tokens(2)).backward()
    optimizer.step()
    assert_holds(model, right)


@run_on()
@pytest.mark.threads
def test_a_checkpoint_is_loaded_into_a_plain_model(checkpoint: str) -> None:
    """Into a model that is not sharded, in a process without ranks."""
    assert Path(checkpoint).is_dir()
    model = Model(seed=5)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    for name, tensor in trained(Model()).state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-12), name
