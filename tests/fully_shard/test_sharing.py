"""Parameters and modules under several names, groups in groups, groups of several modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.fully_shard.models import WIDTH, Language, as_whole, by_layer, every_module, filled, make_tokens
from tests.fully_shard.models import next_token_loss as token_loss
from tests.fully_shard.twins import Twin, make_rows
from tests.ranks import run_on
from weft import FSDPModule, fully_shard

pytestmark = [
    run_on(threads=2, reshard=[True, False]),
    run_on(threads=4, reshard=[2]),
    run_on(gpu=2, nccl=2, reshard=[True]),
]

Reshard = bool | int | None


class Tied(nn.Module):
    """One weight under three names; `width` rows, so that they may be dealt unevenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.again = nn.Linear(width, width, bias=False)
        self.outer.weight = self.again.weight = self.inner.weight
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.outer(torch.tanh(self.inner(rows)))))


def test_tied(reshard: Reshard) -> None:
    """Sizes that divide, that don't, and that are smaller than the number of ranks."""
    for width in (8, 7, 5, 3, 1):
        twin = Twin(Tied(width), as_whole, reshard_after_forward=reshard)
        for step in range(3):
            twin.step(make_rows(step, width=width))
            names = [name for name, _ in twin.sharded.named_parameters(remove_duplicate=False)]
            assert "outer.weight" in names
            assert twin.sharded.outer.weight is twin.sharded.inner.weight is twin.sharded.again.weight


def test_tied_in_a_list(reshard: Reshard) -> None:
    """The modules that share a weight in one group, apart from the root's."""

    def wrap(model: Any, **options: Any) -> None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard([model.embedding, model.head], **options)
        fully_shard(model, **options)

    twin = Twin(Language(), wrap, reshard_after_forward=reshard)
    for step in range(3):
        twin.step(make_tokens(step), token_loss)
    assert twin.sharded.head.weight is twin.sharded.embedding.weight


class Reused(nn.Module):
    """A module that is called twice, and lies under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = self.first
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(rows)))))


def test_reused_module(reshard: Reshard) -> None:
    for wrap in (by_layer, as_whole):
        Twin(Reused(), wrap, reshard_after_forward=reshard).train()


class Nested(nn.Module):
    """Groups in groups, each with parameters of its own beside those of the inner one."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Nested(depth - 1) if depth > 1 else None
        self.after = nn.Linear(WIDTH, WIDTH)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(rows)) * self.scale
        if self.inner is not None:
            hidden = self.inner(hidden)
        return self.after(hidden) + self.scale


def shard_nested(model: Any, **options: Any) -> None:
    if model.inner is not None:
        shard_nested(model.inner, **options)
    fully_shard(model, **options)


def test_nested(reshard: Reshard) -> None:
    for wrap in (shard_nested, every_module, as_whole):
        Twin(Nested(), wrap, reshard_after_forward=reshard).train()


class Row(nn.Module):
    """Four layers, run in order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            rows = torch.tanh(layer(rows))
        return self.d(rows)


def test_several_modules_in_a_group(reshard: Reshard) -> None:
    def wrap(model: Any, **options: Any) -> None:
        result = fully_shard([model.a, model.b], **options)
        assert result == [model.a, model.b]
        assert all(isinstance(module, FSDPModule) for module in result)
        fully_shard([model.c, model.d], **options)
        fully_shard(model, **options)

    Twin(Row(), wrap, reshard_after_forward=reshard).train()


def test_the_rest_in_the_root(reshard: Reshard) -> None:
    """The middle is its own group; the ends are the root's."""

    def wrap(model: Any, **options: Any) -> None:
        fully_shard(model.b, **options)
        fully_shard(model, **options)

    Twin(Row(), wrap, reshard_after_forward=reshard).train()


def test_a_root_without_parameters(reshard: Reshard) -> None:
    def wrap(model: Any, **options: Any) -> None:
        by_layer(model, **options)

    Twin(
        filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), wrap, reshard_after_forward=reshard
    ).train()


def test_several_roots(reshard: Reshard) -> None:
    """The model itself is not sharded: each layer is a root of its own."""

    def wrap(model: Any, **options: Any) -> None:
        for layer in (model.a, model.b, model.c, model.d):
            fully_shard(layer, **options)

    Twin(Row(), wrap, reshard_after_forward=reshard).train()


def test_tied_across_groups_is_refused(reshard: Reshard) -> None:
    """A parameter in two groups would be reduced twice; torch says so at the first forward."""

    def shard_and_run() -> None:
        model = Tied(4)
        every_module(model, reshard_after_forward=reshard)
        model(torch.ones(2, 4, dtype=torch.float64))

    with pytest.raises(ValueError, match="same FSDP group"):
        shard_and_run()
