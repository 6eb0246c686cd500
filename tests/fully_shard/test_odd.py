"""Odd shapes, dtypes, buffers, outputs and ways of using them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.models import WIDTH, Expert, as_whole, by_layer, filled, net
from tests.fully_shard.twins import Twin, assert_is_sharded, make_rows, mean_square, rows_of, single_loss
from tests.ranks import run_on
from weft import fully_shard

pytestmark = run_on(threads=(2, 4), gpu=2, nccl=2)
# For bodies that compare with tensors of the CPU themselves.
ON_CPU = run_on(threads=(2, 4))


class Shapes(nn.Module):
    """Parameters of the given shapes, each in the loss with its own factor."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        factors = (param.square().sum() * (place + 1) for place, param in enumerate(self.params))
        return rows.sum() * sum(factors)


def test_odd_shapes() -> None:
    """Fewer rows than ranks, one row, none; in one group and in groups of their own."""
    shapes = [(1,), (1, 3), (3,), (5, 2), (2, 0, 3), (0, 4), (0,), (7, 1, 2), (1, 1), (3, 5, 2)]
    Twin(Shapes(*shapes), as_whole).train()
    for shape in shapes:
        Twin(Shapes(shape, (2, 3)), as_whole).train(2)


def test_only_empty_parameters() -> None:
    twin = Twin(Shapes((0, 3), (0,)), as_whole)
    twin.backward(make_rows())
    twin.check()


def test_one_element() -> None:
    """All but one rank hold nothing at all."""
    Twin(Shapes((1,)), as_whole).train()
    Twin(nn.Sequential(filled(nn.Linear(WIDTH, 1)), filled(nn.Linear(1, 1)))).train()


def test_scalars_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(model)


def test_dtypes() -> None:
    """A step of SGD in each, with gradients that are exact in it."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        model = nn.Linear(4, 4, bias=True).to(dtype)
        with torch.no_grad():
            model.weight.copy_(torch.eye(4) * 2)
            model.bias.fill_(1)
        twin = Twin(model, as_whole)
        rows = torch.arange(4.0).repeat(dist.get_world_size(), 1).to(dtype)
        for _ in range(2):
            twin.backward(rows, lambda module, part, rank: module(part).sum() * (rank + 1))
            twin.check(0.0)
            twin.update(lr=0.0)


class Normed(nn.Module):
    """Buffers that forward changes, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.layer(rows))


@ON_CPU
def test_buffers() -> None:
    """They stay plain tensors, a rank's own, and are not communicated."""
    model = Normed()
    single = copy.deepcopy(model)
    by_layer(model)
    assert_is_sharded(model, single)
    rows = rows_of(make_rows(), dist.get_rank())
    for step in range(2):
        for each in (model, single):
            each(rows + step).sum().backward()
    assert int(model.calls) == 2
    for (name, seen), right in zip(model.named_buffers(), single.buffers(), strict=True):
        assert type(seen) is torch.Tensor, name
        assert torch.allclose(seen, right, rtol=1e-12, atol=0), name


class Talking(nn.Module):
    """Gives back more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor, *, note: str = "", more: Any = None) -> tuple[Any, ...]:
        return self.layer(rows), note, 3, None, more, {"half": self.layer(rows) / 2, "word": len(note)}


class Listener(nn.Module):
    """Uses what Talking says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Talking()
        self.last = nn.Linear(WIDTH, 2)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        token = object()
        hidden, note, number, nothing, more, rest = self.first(rows, note="abc", more=token)
        assert (note, number, nothing, rest["word"]) == ("abc", 3, None, 3)
        assert more is token
        return self.last(torch.tanh(hidden) + rest["half"])


def test_outputs_that_are_not_tensors() -> None:
    Twin(Listener(), reshard_after_forward=True).train()


class InPlace(nn.Module):
    """Changes in place what a sharded module gave it, and its own output of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        hidden = self.middle(hidden)
        hidden.mul_(2)
        hidden += rows
        return self.last(torch.relu_(hidden))


def test_changes_in_place() -> None:
    for reshard in (True, False):
        Twin(InPlace(), reshard_after_forward=reshard).train()


class Views(nn.Module):
    """The sharded parts return views, which the next ones take."""

    def __init__(self, changes_in_place: bool = False) -> None:
        super().__init__()
        self.changes_in_place = changes_in_place
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0))
        self.second = nn.Sequential(nn.Unflatten(0, (-1, WIDTH)), nn.Linear(WIDTH, 2))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if self.changes_in_place:
            hidden *= 2
        return self.second(hidden)


def test_views_changed_in_place() -> None:
    """Then the hook that gathers for backward must not be lost with what the output was."""
    for reshard in (True, False):
        Twin(Views(changes_in_place=True), reshard_after_forward=reshard).train()


def test_views_returned() -> None:
    with warnings.catch_warnings():
        # torch warns that changing such an output in place would go wrong.
        warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
        for reshard in (True, False):
            Twin(Views(), reshard_after_forward=reshard).train()


def test_the_input_returned() -> None:
    """A module that gives back its input, with parameters that it did not use this time."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Expert(), nn.Linear(WIDTH, WIDTH)
            self.gate = Gate()
            filled(self)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.last(self.gate(self.first(rows)))

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
        twin = Twin(Lazy(), reshard_after_forward=True)
        twin.train()
    assert twin.sharded.gate.layer.weight.grad is None


@ON_CPU
def test_ignored_parameters() -> None:
    """They stay plain, and their gradients are this rank's own."""
    model = net()
    single = copy.deepcopy(model)
    ignored = set(model[2].parameters())
    for layer in (model[0], model[4], model):
        fully_shard(layer, ignored_params=ignored)
    assert type(model[2].weight) is nn.Parameter
    rows, rank = make_rows(), dist.get_rank()
    mean_square(model, rows_of(rows, rank), rank).backward()
    mean_square(single, rows_of(rows, rank), rank).backward()
    assert torch.allclose(model[2].weight.grad, single[2].weight.grad, rtol=1e-12, atol=0)
    single.zero_grad()
    single_loss(single, rows).backward()
    wanted = single[0].weight.grad.chunk(dist.get_world_size())
    local = model[0].weight.grad.to_local()
    if local.numel():
        assert torch.allclose(local, wanted[rank], rtol=1e-11, atol=1e-15)


def test_errors_in_forward() -> None:
    """On every rank: after reset_iter_state the next step is right."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.fails = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False
            filled(self)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            hidden = self.first(rows)
            if self.fails:
                raise LookupError("on purpose")
            return self.second(hidden)

    twin = Twin(Failing())
    for _ in range(2):
        twin.train(1)
        twin.sharded.fails = True
        with pytest.raises(LookupError, match="on purpose"):
            twin.sharded(make_rows())
        twin.sharded.fails = False
        twin.sharded.reset_iter_state()
