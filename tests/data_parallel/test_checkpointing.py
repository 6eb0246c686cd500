"""Activation checkpointing under DDP: reentrant or not, once, twice, with tied weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import weft_only
from tests.data_parallel.twins import WIDTH, Twin, filled, make_rows
from tests.ranks import run_on

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, pytest.param(True, marks=FULL)])
REENTRANT = pytest.mark.parametrize("reentrant", [False, True])
STATIC = pytest.mark.parametrize("static", [False, True])


class Checkpointed(nn.Module):
    """Runs the named layers one after the other, each behind a checkpoint."""

    def __init__(self, order: str, *, reentrant: bool, tied: bool = False, frozen: str = "") -> None:
        super().__init__()
        self.order, self.reentrant = order, reentrant
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abcd"})
        if tied:
            self.layers["c"].weight = self.layers["b"].weight
        filled(self)
        for name in frozen:
            self.layers[name].requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.layers["a"](rows)
        for name in self.order:
            hidden = checkpoint(self.layers[name], torch.tanh(hidden), use_reentrant=self.reentrant)
        return self.layers["d"](hidden)


def train(model: nn.Module, steps: int = 3, **options: object) -> None:
    twin = Twin(model, **options)
    for step in range(steps):
        twin.step(make_rows(step))


@VIEW
@REENTRANT
@STATIC
def test_each_layer_once(reentrant: bool, static: bool, view: bool) -> None:
    model = Checkpointed("bc", reentrant=reentrant)
    train(model, static_graph=static, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)


@VIEW
@STATIC
def test_a_layer_twice_without_reentrance(static: bool, view: bool) -> None:
    train(Checkpointed("bcb", reentrant=False), static_graph=static, gradient_as_bucket_view=view)


@VIEW
def test_a_layer_twice_with_reentrance_and_static_graph(view: bool) -> None:
    train(Checkpointed("bcb", reentrant=True), static_graph=True, gradient_as_bucket_view=view)


def test_a_layer_twice_with_reentrance_is_refused_by_name() -> None:
    twin = Twin(Checkpointed("bcb", reentrant=True), bucket_cap_mb=0.0001)
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as caught:
        twin.backward(make_rows())
    assert "layers.b." in str(caught.value)


@VIEW
@STATIC
def test_tied_weights_without_reentrance(static: bool, view: bool) -> None:
    train(Checkpointed("bc", reentrant=False, tied=True), static_graph=static, gradient_as_bucket_view=view)


@VIEW
def test_tied_weights_with_reentrance_and_static_graph(view: bool) -> None:
    train(Checkpointed("bc", reentrant=True, tied=True), static_graph=True, gradient_as_bucket_view=view)


@weft_only("raises without static_graph or find_unused_parameters")
@REENTRANT
def test_unused_parameters_beside_checkpoints(reentrant: bool) -> None:
    train(Checkpointed("b", reentrant=reentrant))  # c stays unused


@REENTRANT
def test_unused_parameters_beside_checkpoints_in_a_static_graph(reentrant: bool) -> None:
    train(Checkpointed("b", reentrant=reentrant), static_graph=True)


@REENTRANT
def test_a_frozen_layer_behind_a_checkpoint(reentrant: bool) -> None:
    train(Checkpointed("bc", reentrant=reentrant, frozen="c"), bucket_cap_mb=0.0001)


@REENTRANT
def test_accumulation_under_no_sync(reentrant: bool) -> None:
    twin = Twin(Checkpointed("bc", reentrant=reentrant))
    for step in range(2):
        with twin.parallel.no_sync():
            twin.backward(make_rows(10 * step))
        twin.backward(make_rows(10 * step + 1))
        twin.check()
        twin.update()
