"""A sharded model over its life: made, loaded, cast, run in parts, failed, freed."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from tests.fully_shard.models import (
    WIDTH,
    Experts,
    Language,
    by_layer,
    filled,
    make_tokens,
    net,
    next_token_loss,
)
from tests.fully_shard.twins import Twin, assert_is_sharded, make_rows, mean_square, rows_of, single_loss
from tests.ranks import run_on
from weft import fully_shard
from weft.comm_hooks.default_hooks import allreduce_hook

pytestmark = run_on(threads=(2, 4), gpu=2, nccl=2)


def twin_of(sharded: nn.Module, single: nn.Module) -> Twin:
    """A pair that is sharded already."""
    twin = Twin.__new__(Twin)
    twin.sharded, twin.single = sharded, single
    assert_is_sharded(sharded, single)
    twin.assert_same_parameters()
    return twin


def test_assigned_state() -> None:
    """load_state_dict(assign=True) of shards into a model without memory: how a large one is loaded."""
    single = net()
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) if place % 2 == 0 else nn.Tanh() for place in range(5))
        )
    model.double()
    by_layer(model)
    state = model.state_dict()
    loaded = {
        name: distribute_tensor(tensor.clone(), state[name].device_mesh, state[name].placements)
        for name, tensor in single.state_dict().items()
    }
    model.load_state_dict(loaded, assign=True)
    assert not any(param.is_meta for param in model.parameters())
    twin_of(model, single).train()


def test_assigned_state_after_training() -> None:
    twin = Twin(net())
    twin.train(2)
    state = {name: (tensor.detach() * 2) for name, tensor in twin.sharded.state_dict().items()}
    right = {name: tensor * 2 for name, tensor in twin.single.state_dict().items()}
    twin.sharded.load_state_dict(state, assign=True)
    twin.single.load_state_dict(right)
    twin.assert_same_parameters()
    twin.train(2)


def test_cast_after_training() -> None:
    """Another dtype in the middle of training."""
    model = net().float()
    single = copy.deepcopy(model)
    by_layer(model)
    rank = dist.get_rank()
    for each, rows in ((model, rows_of(make_rows(), rank)), (single, make_rows())):
        mean_square(each, rows.float(), rank).backward()
        each.zero_grad()
    twin_of(model.double(), single.double()).train()


def test_a_part_on_its_own() -> None:
    """After the root has run once, a sharded module inside may be called alone."""
    twin = Twin(net())
    twin.train(1)
    rank = dist.get_rank()
    for step in range(2):
        rows = make_rows(step)
        mean_square(twin.sharded[2], rows_of(rows, rank), rank).backward()
        single_loss(twin.single[2], rows).backward()
        twin.check()
        twin.update()
        twin.train(1)


def test_a_part_before_the_root() -> None:
    """A module that has run as a root can't be part of another one."""
    model = net()
    by_layer(model)
    model[0](make_rows())
    with pytest.raises(RuntimeError, match="root module first"):
        model(make_rows())


def test_errors_in_backward() -> None:
    """On every rank: after reset_iter_state the next step is right."""
    twin = Twin(net())

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise LookupError("on purpose")

    def fail_later(out: torch.Tensor) -> None:
        out.register_hook(fail)

    for _ in range(2):
        twin.train(1)
        rows = rows_of(make_rows(), dist.get_rank())
        handle = twin.sharded[1].register_forward_hook(lambda module, args, out: fail_later(out))
        loss = twin.sharded(rows).square().mean()
        handle.remove()
        with pytest.raises(LookupError, match="on purpose"):
            loss.backward()
        del loss
        twin.sharded.reset_iter_state()
        twin.sharded.zero_grad()
    twin.train(2)


def test_hooks_registered_late() -> None:
    """After steps have been made: hooks of parameters, of reductions, and settings."""
    twin = Twin(net())
    twin.train(2)
    calls: list[str] = []
    for name, param in twin.sharded.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append(name))
    twin.sharded.register_comm_hook(None, allreduce_hook)
    twin.sharded.set_reshard_after_forward(False)
    twin.train(2)
    assert len(calls) == 2 * len(list(twin.sharded.parameters()))


def test_freed() -> None:
    """Nothing keeps a model that nobody has any more; its parameters' memory goes with it."""
    model: Any = Language()
    for place in range(2):
        fully_shard(model.blocks[place])
    fully_shard(model)
    for step in range(2):
        next_token_loss(model, make_tokens(step)).backward()
    gone = [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(model.blocks[0].up.weight)]
    dist.barrier()
    del model
    gc.collect()
    dist.barrier()  # a collection may be under way in another rank's thread
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, True]


def test_many_models_one_after_another() -> None:
    for seed in range(5):
        twin = Twin(filled(Experts("ab"), seed))
        twin.train(2, lambda model, rows, rank: model(rows, "ab" if rank else "b").square().mean())
