"""Ranks that compile differently: they neither hang nor get wrong gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from tests.compiler import models
from tests.compiler.pairs import LIMITS, MAY_WARN, WRAPS, Pair, fresh, make_rows
from tests.ranks import run_on

pytestmark = [run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **LIMITS), MAY_WARN]

LAST = -1  # index of what the last rank uses


def is_last_rank(rank: int | None = None) -> bool:
    return (dist.get_rank() if rank is None else rank) == dist.get_world_size() - 1


def sized_loss(sizes: Any) -> Any:
    """The rows of a rank are as many as `sizes(rank, salt)`."""

    def loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
        rank = dist.get_rank() if rank is None else rank
        return model(make_rows(rank, salt, sizes(rank, salt))).square().mean()

    return loss


@run_on(gloo=2, weft=2, wrap=WRAPS, kind=["plain"], full=True, **LIMITS)
@run_on(gloo=2, wrap=WRAPS, kind=["torch"], full=True, **LIMITS)
def test_another_batch_size(wrap: str, kind: str) -> None:
    """Always another one on the last rank; then a batch of one row, which Dynamo takes for special."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(loss=sized_loss(lambda rank, salt: 9 if is_last_rank(rank) else 4), kind=kind)
    pair.train(loss=sized_loss(lambda rank, salt: 1 if is_last_rank(rank) else 4), kind=kind)


@run_on(weft=2, wrap=["ddp"], kind=["plain"], **LIMITS)
@run_on(weft=(2, 4), wrap=["replicate"], kind=["plain"], full=True, **LIMITS)
@run_on(gloo=2, wrap=WRAPS, kind=["plain", "torch"], full=True, **LIMITS)
def test_recompile_on_one_rank(wrap: str, kind: str) -> None:
    """The last rank's sizes change from step to step, and no other's."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(loss=sized_loss(lambda rank, salt: 4 + salt if is_last_rank(rank) else 4), steps=5, kind=kind)


def test_over_the_limit_on_one_rank(wrap: str) -> None:
    """The last rank has compiled too often and goes on without a compiler."""
    fresh()
    pair = Pair(wrap=wrap, fullgraph=False)
    loss = sized_loss(lambda rank, salt: 4 + salt if is_last_rank(rank) else 4)
    options: Any = {"recompile_limit": 2, "assume_static_by_default": True, "automatic_dynamic_shapes": False}
    with torch._dynamo.config.patch(**options):
        pair.train(loss=loss, steps=6)


def test_compiled_on_one_rank_only(wrap: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)
    if is_last_rank():
        pair.compiled = pair.under
    pair.train()


def test_another_backend_on_one_rank(wrap: str) -> None:
    fresh()
    pair = Pair(wrap=wrap, backend="eager" if is_last_rank() else "aot_eager")
    pair.train()


def test_graph_break_on_one_rank(wrap: str) -> None:
    """Two graphs on the last rank, one on the others."""
    fresh()

    class Sometimes(models.Broken):
        def forward(self, x: Tensor) -> Tensor:
            first, middle, last = self.layers
            x = torch.tanh(first(x))
            if is_here:
                torch._dynamo.graph_break()
            return last(torch.tanh(middle(x)))

    is_here = is_last_rank()
    pair = Pair(lambda: models.filled(Sometimes()), wrap, fullgraph=False)
    pair.train()
    assert (sum(counters["graph_break"].values()) > 0) == is_here


def test_traced_backward_on_one_rank(wrap: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(kind="weft" if is_last_rank() else "plain")


@run_on(gloo=2, wrap=["replicate"], **LIMITS)
@run_on(gloo=2, wrap=["ddp"], full=True, **LIMITS)
@run_on(weft=2, wrap=WRAPS, full=True, **LIMITS)
def test_other_parameters_on_one_rank(wrap: str) -> None:
    """The graphs of ranks hold other parameters, with several buckets."""
    fresh()
    pair = Pair(models.branches, wrap, bucket_cap_mb=0.0001, is_exact=False)
    for salt, names in enumerate([("abc", "abc"), ("a", "c"), ("cb", ""), ("a", "c"), ("abc", "abc")]):

        def loss(model: Any, salt: int, rank: int | None = None, names: Any = names) -> Tensor:
            rank = dist.get_rank() if rank is None else rank
            return model(make_rows(rank, salt), names[LAST if is_last_rank(rank) else 0]).square().mean()

        pair.step(salt, loss)
