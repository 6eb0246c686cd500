"""What a user calls on a sharded module besides forward, and ways of running it without gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fully_shard.models import WIDTH, Language, filled, make_tokens, net, next_token_loss
from tests.fully_shard.twins import Twin, assert_is_sharded, make_rows, rows_of
from tests.ranks import run_on
from weft import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

pytestmark = run_on(threads=(2, 4), gpu=2, nccl=2)
# For bodies that compare with tensors of the CPU themselves.
ON_CPU = run_on(threads=(2, 4))


def is_gathered(module: nn.Module) -> bool:
    """Whether the module's own parameters are full plain ones; a mixture fails."""
    kinds = {isinstance(param, DTensor) for param in module.parameters()}
    assert len(kinds) == 1
    return not kinds.pop()


def same(seen: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((seen - right).abs().max() <= 1e-12 * right.abs().max())


class Coder(nn.Module):
    """Has two ways in besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(rows))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Needs the parameters gathered."""
        return torch.tanh(rows @ self.layer.weight.t()) * self.scale

    def decode(self, rows: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        """The same."""
        return rows @ self.layer.weight + self.layer.bias + shift


def test_other_methods() -> None:
    for reshard in (True, False):
        twin = Twin(
            Coder(), lambda model, **options: fully_shard(model, **options), reshard_after_forward=reshard
        )
        for model in (twin.sharded, twin.single):  # nothing happens to one that is not sharded
            register_fsdp_forward_method(model, "encode")
            register_fsdp_forward_method(model, "decode")

        def loss(model: Any, rows: torch.Tensor, rank: int) -> torch.Tensor:
            return model.decode(model.encode(rows), shift=0.5).square().mean()

        twin.train(loss=loss)
        twin.train(1)
    with pytest.raises(ValueError, match="does not have a method"):
        register_fsdp_forward_method(twin.sharded, "translate")


@ON_CPU
def test_without_gradients() -> None:
    twin = Twin(net())
    rows = rows_of(make_rows(), dist.get_rank())
    right = twin.single(rows).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                out = twin.sharded(rows)
                assert same(out, right)
                assert not out.requires_grad
    twin.train()
    with torch.inference_mode():
        twin.sharded(rows)
    twin.train(1)


def test_inference_before_anything() -> None:
    """What the first forward sets up serves training too."""
    twin = Twin(net())
    with torch.inference_mode():
        twin.sharded(rows_of(make_rows(), dist.get_rank()))
    twin.train()


@ON_CPU
def test_unshard_and_reshard() -> None:
    twin = Twin(net())
    twin.train(1)
    first = twin.sharded[0]
    assert first.unshard() is None
    assert is_gathered(first)
    assert not is_gathered(twin.sharded[2])
    for param, right in zip(first.parameters(), twin.single[0].parameters(), strict=True):
        assert type(param) is nn.Parameter
        assert same(param.detach(), right.detach())
    first.unshard()  # already there
    first.reshard()
    first.reshard()
    assert not is_gathered(first)
    twin.train(1)


def test_unshard_async() -> None:
    twin = Twin(net())
    twin.train(1)
    handles = [twin.sharded[place].unshard(async_op=True) for place in (0, 2)]
    assert all(isinstance(handle, UnshardHandle) for handle in handles)
    handles[0].wait()
    handles[0].wait()
    assert is_gathered(twin.sharded[0])
    twin.train(2)  # the other's handle is waited for by its forward
    handle = twin.sharded[4].unshard(async_op=True)
    handle.wait()
    twin.sharded[4].reshard()
    assert not is_gathered(twin.sharded[4])
    twin.train(1)


def test_unshard_before_the_first_forward() -> None:
    twin = Twin(net())
    for place in (0, 2, 4):
        twin.sharded[place].unshard(async_op=True)
    twin.train(2)


def test_what_is_registered_after_forward() -> None:
    rows = make_rows()
    for reshard in (True, False, None):
        model = net()
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        loss = model(rows).sum()
        assert is_gathered(model[0]) is (reshard is False)
        loss.backward()
        assert not is_gathered(model)


def test_the_root_is_kept_unless_told() -> None:
    model = filled(nn.Linear(WIDTH, WIDTH))
    fully_shard(model)
    model(make_rows())
    assert is_gathered(model)
    model.set_reshard_after_forward(True)
    model.reshard()
    model(make_rows())
    assert not is_gathered(model)
    model.set_reshard_after_forward(False, recurse=False)
    model(make_rows())
    assert is_gathered(model)
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_reshard_after_forward(2)


def test_kept_after_backward() -> None:
    twin = Twin(net())
    twin.sharded.set_reshard_after_backward(False)
    twin.backward(make_rows())
    assert all(is_gathered(twin.sharded[place]) for place in (0, 2, 4))
    for place in (0, 2, 4):
        twin.sharded[place].reshard()
    twin.check()
    twin.update()
    twin.sharded.set_reshard_after_backward(True)
    twin.train(2)


def test_prefetch_as_told() -> None:
    twin = Twin(net(5))
    layers = [twin.sharded[place] for place in range(0, 9, 2)]
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 3])
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(0, place - 2) : place])))
    twin.train(3)
    with pytest.raises(ValueError, match="FSDPModule"):
        layers[0].set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="FSDPModule"):
        layers[0].set_modules_to_backward_prefetch([nn.Linear(1, 1)])


def test_no_gather_in_backward_where_it_is_not_needed() -> None:
    """An embedding's backward does not read its weight."""

    class Reading(Language):
        def __init__(self) -> None:
            super().__init__()
            self.head = filled(nn.Linear(6, 11, bias=False), seed=3)

    twin = Twin(Reading(), reshard_after_forward=True)
    twin.sharded.embedding.set_unshard_in_backward(False)
    for step in range(3):
        twin.step(make_tokens(step), next_token_loss)


def test_settings_that_change_no_result() -> None:
    twin = Twin(net())
    for place in (0, 2, 4):
        twin.sharded[place].set_allocate_memory_from_process_group_for_comm(True)
        twin.sharded[place].set_force_sum_reduction_for_comms(True)
    twin.train(2)


def test_copies() -> None:
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)
    twin = Twin(net())
    twin.train(1)
    other = copy.copy(twin)
    other.sharded, other.single = copy.deepcopy(twin.sharded), copy.deepcopy(twin.single)
    assert isinstance(other.sharded, FSDPModule)
    assert_is_sharded(other.sharded, other.single)
    other.train(2)
    twin.assert_same_parameters()  # the copy's steps were its own
    twin.train(2)
    other.assert_same_parameters()


def test_classes_and_state() -> None:
    model = net()
    assert fully_shard(model[0]) is model[0]
    assert fully_shard(model) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert fully_shard.state(model) is not None
    assert fully_shard.state(model) is fully_shard.state(model)
    assert type(model[:2]) is nn.Sequential
    assert not isinstance(model[2], FSDPModule)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        fully_shard(model)
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(1, 1)]))


def test_shared_streams() -> None:
    twins = [Twin(net()) for _ in range(2)]
    share_comm_ctx([twin.sharded for twin in twins])
    for _ in range(2):
        for twin in twins:
            twin.train(1)
    with pytest.raises(ValueError, match="FSDPModule"):
        share_comm_ctx([nn.Linear(1, 1)])


def test_another_dtype() -> None:
    """`model.double()` after sharding, before the first forward."""
    model = net().float()
    single = copy.deepcopy(model).double()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer)
    twin = copy.copy(Twin(net()))
    twin.sharded, twin.single = model.double(), single
    twin.train(2)
