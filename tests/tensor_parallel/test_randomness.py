"""Random numbers: each rank draws its own on cut sequences, all draw the same elsewhere.

Ranks are processes: threads share a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, language_plan, mlp_plan, sequence_plan
from tests.tensor_parallel.twins import (
    are_different,
    are_same,
    assert_is_part,
    full_of,
    local_of,
    make_mesh,
    numbers,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = run_on(weft=2, timeout=60, full=True)

ROWS = (4, 16, 8)


def make_dropout(tp: Any, p: float = 0.5) -> nn.Module:
    return tp.parallelize_module(nn.Dropout(p), make_mesh(), tp.SequenceParallel(use_local_output=True))


def ones() -> torch.Tensor:
    return torch.ones(ROWS, dtype=torch.float64, requires_grad=True)


@run_on(weft=(2, 4), timeout=60, full=True)
def test_masks_are_each_ranks_own(tp: Any) -> None:
    """With equal seeds too; about half is dropped, and gradients go where the output went."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        dropout, given = make_dropout(tp), ones()
        seen = dropout(given)
        assert are_different(seen)
        kept = (seen != 0).double().mean().item()
        assert 0.35 < kept < 0.65
        assert set(seen.detach().unique().tolist()) == {0.0, 2.0}
        seen.sum().backward()
        assert torch.equal(given.grad, seen.detach())


def test_masks_follow_the_seed(tp: Any) -> None:
    """The same seed gives the same masks, another seed others, and the next call others again."""
    dropout = make_dropout(tp)
    seen = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        seen.append((dropout(ones()), dropout(ones())))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[0][0], seen[2][0])
    assert not torch.equal(seen[0][0], seen[0][1])


@run_on(weft=2, timeout=60)
def test_masks_are_replayed(tp: Any) -> None:
    """Both kinds of checkpointing: the mask of the second forward is that of the first."""
    for is_reentrant in (True, False):
        torch.manual_seed(0)
        dropout, given = make_dropout(tp), ones()
        seen = checkpoint(dropout, given, use_reentrant=is_reentrant)
        torch.rand(3)  # others draw in between
        dropout(ones())
        assert are_different(seen)
        seen.sum().backward()
        assert torch.equal(given.grad, seen.detach())


def test_what_comes_behind_is_the_same(tp: Any) -> None:
    """A dropout of copies behind one of a cut sequence drops the same on every rank."""
    torch.manual_seed(0)
    dropout = make_dropout(tp)
    for _ in range(2):
        assert are_different(dropout(ones()))
        assert are_same(nn.functional.dropout(torch.ones(64), 0.5))
        assert are_same(torch.rand(8))


def test_backward_draws_nothing(tp: Any) -> None:
    """Behind a backward with replay, ranks still draw the same."""
    for is_reentrant in (True, False):
        torch.manual_seed(0)
        dropout = make_dropout(tp)
        checkpoint(dropout, ones(), use_reentrant=is_reentrant).sum().backward()
        assert are_same(torch.rand(8))


class Dropping(nn.LayerNorm):
    """A norm that drops, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(input), 0.5, self.training)


def test_modules_that_drop(tp: Any) -> None:
    """Users' modules and whole sequences of modules draw their own on each rank."""
    for make in (lambda: Dropping(8), lambda: nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))):
        torch.manual_seed(0)
        style = tp.SequenceParallel(use_local_output=True)
        model = tp.parallelize_module(make().double(), make_mesh(), style)
        assert are_different((model(numbers(*ROWS)) == 0).double())
        assert are_same(torch.rand(8))


def test_nothing_is_dropped_in_evaluation(tp: Any) -> None:
    dropout = make_dropout(tp).eval()
    given = ones()
    assert torch.equal(dropout(given), given)


@run_on(weft=2, timeout=60)
def test_a_users_own(tp: Any) -> None:
    """Inside the context each rank draws its own, outside all draw the same; errors change nothing."""
    mesh = make_mesh()
    torch.manual_seed(0)
    with tp.local_randomness(mesh):
        first = torch.rand(16)
        second = torch.rand(16)
    assert are_different(first)
    assert are_different(second)
    assert not torch.equal(first, second)
    assert are_same(torch.rand(16))
    with tp.local_randomness(mesh):
        third = torch.rand(16)
    assert not torch.equal(first, third)
    with pytest.raises(ZeroDivisionError), tp.local_randomness(mesh):
        raise ZeroDivisionError
    assert are_same(torch.rand(16))
    torch.manual_seed(0)
    with tp.local_randomness(mesh):
        assert torch.equal(torch.rand(16), first)


def test_a_users_own_is_replayed(tp: Any) -> None:
    mesh = make_mesh()

    def block(rows: torch.Tensor) -> torch.Tensor:
        with tp.local_randomness(mesh):
            return nn.functional.dropout(rows, 0.5)

    for is_reentrant in (True, False):
        torch.manual_seed(0)
        given = ones()
        seen = checkpoint(block, given, use_reentrant=is_reentrant)
        assert are_different(seen)
        seen.sum().backward()
        assert torch.equal(given.grad, seen.detach())


def reset_by_one(model: nn.Module, seed: int) -> nn.Module:
    """What a single process has with that seed."""
    torch.manual_seed(seed)
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Without a value. Models fill themselves, which does nothing here."""
    with torch.device("meta"):
        return make()


def bare_language() -> nn.Module:
    """Layers in a row, of every style and with uneven sizes."""
    return nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 7)
    )


def bare_plan(tp: Any) -> dict[str, Any]:
    return {
        "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": tp.SequenceParallel(use_local_output=True),
        "2": tp.ColwiseParallel(input_layouts=Shard(1)),
        "3": tp.RowwiseParallel(),
        "4": tp.ColwiseParallel(output_layouts=Replicate()),
    }


def check_initial(model: nn.Module, right: nn.Module) -> None:
    wanted = dict(right.named_parameters())
    for name, param in model.named_parameters():
        assert param.device.type == "cpu", name
        assert param.requires_grad, name
        assert_is_part(param, wanted[name].detach(), name, 0.0)


@run_on(weft=2, timeout=60)
@run_on(weft=4, timeout=60, full=True)
def test_initialised_as_by_one(tp: Any) -> None:
    """To the bit, whatever the placements; and then it trains."""
    for seed in (0, 7):
        for make, plan in ((bare_language, bare_plan), (MLP, mlp_plan)):
            model = on_meta(make)
            tp.parallelize_module(model, make_mesh(), plan(tp))
            with pytest.raises(weft.ConfigError, match="meta device"):
                tp.init_parameters(model, seed=seed)
            tp.init_parameters(model.to_empty(device="cpu"), seed=seed)
            check_initial(model, reset_by_one(make(), seed))
            rows = torch.arange(8).view(2, 4) if make is bare_language else numbers(2, 8).float()
            model(rows).sum().backward()


@run_on(weft=4, timeout=60, full=True)
def test_initialised_under_sharding(tp: Any) -> None:
    """On four ranks: two axes."""
    mesh = make_mesh(2, dist.get_world_size() // 2, names="dp tp")
    model = on_meta(bare_language)
    tp.parallelize_module(model, mesh["tp"], bare_plan(tp))
    weft.fully_shard(model, mesh=mesh["dp"])
    tp.init_parameters(model.to_empty(device="cpu"), seed=3)
    check_initial(model, reset_by_one(bare_language(), 3))


def test_initialised_without_a_seed(tp: Any) -> None:
    """Ranks agree whatever their own seeds are."""
    torch.manual_seed(dist.get_rank())
    model: Any = on_meta(MLP)
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    tp.init_parameters(model.to_empty(device="cpu"))
    assert are_same(local_of(model.net2.bias))
    assert full_of(model.net1.weight).std() > 0.05
    other: Any = on_meta(MLP)
    tp.parallelize_module(other, make_mesh(), mlp_plan(tp))
    tp.init_parameters(other.to_empty(device="cpu"))
    assert not torch.equal(full_of(other.net1.weight), full_of(model.net1.weight))


def test_whole_models(tp: Any) -> None:
    """Values that rank 0 had are the single process's, whatever the other ranks drew."""
    for plan in (language_plan, sequence_plan):
        torch.manual_seed(100 + dist.get_rank())
        model = Language()
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        held = [values]
        dist.broadcast_object_list(held)
        rights = held[0]
        tp.parallelize_module(model, make_mesh(), plan(tp))
        for name, param in model.named_parameters():
            if name.split(".")[-2] in ("norm", "norm1", "norm2"):
                continue  # left alone by one plan; the other takes each rank's own, as torch's does
            assert_is_part(param, rights[name], name, 0.0)
