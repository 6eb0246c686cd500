"""Backward through fully sharded modules: what is not used, what wraps activations, hooks after accumulation.

Each proves first that the parameters are in parts: most of this would hold if nothing were sharded.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.models import Language, filled, make_tokens, net
from tests.fully_shard.twins import (
    Twin,
    all_ranks,
    assert_is_shard,
    assert_is_sharded,
    assert_same_gradients,
    full_of,
    make_rows,
    rows_of,
)
from tests.ranks import run_on
from weft import fully_shard

pytestmark = run_on(threads=(2, 4))

Reshard = bool | int
DIM = 24
RESHARDS: list[Reshard] = [True, False, 2]
EVERYWHERE = run_on(weft=(2, 4), gloo=(2, 4), timeout=90, full=True, also=True)


class TwoLinears(nn.Module):
    """Returns what both made of the input, or only the first's."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.uses_second = uses_second
        filled(self, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> Any:
        if self.uses_second:
            return self.first(rows), self.second(rows)
        return self.first(rows)


def train_beside(
    model: TwoLinears, loss_of: Callable[[int, Any], torch.Tensor], sharded: list[str], reshard: Reshard
):
    """Ten steps of Adam; losses are sums over rows, so the single process's gradients are divided."""
    single = copy.deepcopy(model)
    for name in sharded:
        fully_shard(model.get_submodule(name), reshard_after_forward=reshard)
    assert_is_sharded(model, single)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, single)]
    size = dist.get_world_size()
    for step in range(10):
        rows = make_rows(step, per_rank=2, width=DIM)
        loss = loss_of(step, model(rows_of(rows, dist.get_rank())))
        right = loss_of(step, single(rows))
        loss.backward()
        right.backward()
        for param in single.parameters():
            if param.grad is not None:
                param.grad.div_(size)
        total = sum(all_ranks(loss.item()))
        assert abs(total - right.item()) <= 1e-10 * max(1.0, abs(right.item())), step
        assert_same_gradients(model, single)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
        for (name, param), other in zip(model.named_parameters(), single.parameters(), strict=True):
            assert_is_shard(param, other, name, 1e-9)


@pytest.mark.parametrize("reshard", RESHARDS)
def test_unused_forward_output(reshard: Reshard) -> None:
    """From the third step on the second output has no part in the loss."""

    def loss_of(step: int, outputs: Any) -> torch.Tensor:
        first, second = outputs
        return (first * second).sum() if step < 3 else first.sum()

    train_beside(TwoLinears(uses_second=True), loss_of, ["first", ""], reshard)


@pytest.mark.parametrize("reshard", RESHARDS)
def test_unused_forward_module(reshard: Reshard) -> None:
    model = TwoLinears(uses_second=False)
    train_beside(model, lambda step, output: output.sum(), ["first", "second", ""], reshard)


Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Point:
    """Two activations."""

    x: Any
    y: Any


CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "list": (lambda x, y: [x, y], tuple),
    "namedtuple": (Pair, lambda pair: (pair.x, pair.y)),
    "tuple": (lambda x, y: (x, y), lambda pair: pair),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda pair: (pair["x"], pair["y"])),
    "dataclass": (Point, lambda point: (point.x, point.y)),
    "nested": (
        lambda x, y: {"p": [Point(x, 3), {"q": (y, None)}]},
        lambda t: (t["p"][0].x, t["p"][1]["q"][0]),
    ),
}


class Packing(nn.Module):
    """Takes and gives two activations in a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.weight = nn.Parameter(torch.empty(DIM, DIM))

    def forward(self, packed: Any) -> Any:
        pack, unpack = CONTAINERS[self.container]
        x, y = unpack(packed)
        return pack(torch.tanh(x @ self.weight), y + x @ self.weight)


class Packed(nn.Module):
    """A row of layers between which activations travel in a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packing(container) for _ in range(3))
        self.container = container
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        pack, unpack = CONTAINERS[self.container]
        packed = pack(rows, rows * 2)
        for layer in self.layers:
            packed = layer(packed)
        x, y = unpack(packed)
        return x + y


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(container: str) -> None:
    """The backward hooks of a module find its activations wherever they are."""
    twin = Twin(Packed(container), reshard_after_forward=True)
    for step in range(3):
        twin.step(make_rows(step, width=DIM))


@EVERYWHERE
def test_hooks_run_once() -> None:
    model = net()
    single = copy.deepcopy(model)
    for module in (model[0], model[2], model[4], model):
        fully_shard(module)
    assert_is_sharded(model, single)
    counts: collections.Counter[str] = collections.Counter()

    def hook(name: str, param: torch.Tensor) -> None:
        assert param.grad is not None, name
        counts[name] += 1

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(hook, name))
    rows = make_rows()
    for step in range(3):
        model(rows_of(rows, dist.get_rank())).sum().backward()
        assert counts == {name: step + 1 for name, _ in model.named_parameters()}


def sharded_language() -> nn.Module:
    model = Language().float()
    single = copy.deepcopy(model)
    for module in (*model.blocks, model):
        fully_shard(module)
    assert_is_sharded(model, single)
    return model


@EVERYWHERE
def test_optimizer_in_backward() -> None:
    """To the bit: the same arithmetic on the same shards, only earlier."""
    reference, model = sharded_language(), sharded_language()
    options: Any = {"lr": 1e-2, "foreach": False}
    optimizer = torch.optim.AdamW(reference.parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    own: dict[Any, Any] = {param: torch.optim.AdamW([param], **options) for param in model.parameters()}
    schedules = {param: torch.optim.lr_scheduler.StepLR(own[param], step_size=5) for param in own}

    def step_at_once(param: nn.Parameter) -> None:
        own[param].step()
        own[param].zero_grad()
        schedules[param].step()

    for param in own:
        param.register_post_accumulate_grad_hook(step_at_once)
    tokens = make_tokens(1 + dist.get_rank())
    losses: list[float] = []
    for step in range(10):
        right = reference(tokens).sum()
        right.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        loss = model(tokens).sum()
        loss.backward()
        assert torch.equal(loss, right), step
        assert all(param.grad is None for param in own), step
        others: list[Any] = list(reference.parameters())
        for param, other in zip(own, others, strict=True):
            assert torch.equal(param.to_local(), other.to_local()), step
        losses.append(loss.item())
    assert losses[-1] != losses[0]
    assert all(torch.isfinite(full_of(param)).all() for param in own)


@run_on(weft=(2, 4), gloo=(2, 4), timeout=90, full=True)
def test_what_is_unused_in_one_job() -> None:
    """On processes; starting a group costs more than each of them."""
    for reshard in RESHARDS:
        test_unused_forward_output(reshard)
        test_unused_forward_module(reshard)


@run_on(weft=(2, 4), gloo=(2, 4), timeout=90, full=True)
def test_all_containers_in_one_job() -> None:
    for container in CONTAINERS:
        test_containers(container)
