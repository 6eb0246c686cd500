"""Compiled training of models of every kind, each against its eager twin and a bare one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compiler import models
from tests.compiler.pairs import LONG, MAY_WARN, WRAPS, Pair, fresh, inner, make_rows
from tests.ranks import run_on

pytestmark = [run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **LONG), MAY_WARN]


def test_checkpointing(wrap: str) -> None:
    fresh()
    Pair(models.checkpointed, wrap).train()


def test_tied_parameters(wrap: str) -> None:
    fresh()
    Pair(models.tied, wrap).train()


def test_graph_break(wrap: str) -> None:
    fresh()
    Pair(models.broken, wrap, fullgraph=False).train()


def test_frozen_parameters(wrap: str) -> None:
    fresh()
    pair = Pair(models.frozen, wrap)
    pair.train()
    assert inner(pair.under, wrap)[1].weight.grad is None


def test_channels_last(wrap: str) -> None:
    fresh()
    pair = Pair(models.conv, wrap)
    pair.train(loss=models.image_loss)
    assert inner(pair.under, wrap).conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_many_dtypes(wrap: str) -> None:
    fresh()
    pair = Pair(models.many_dtypes, wrap)
    for salt in range(3):
        pair.zero_grad()
        pair.backward(salt)
        pair.check(with_bare=False)
        for (name, param), right in zip(
            inner(pair.under, wrap).named_parameters(), pair.bare.parameters(), strict=True
        ):
            assert param.grad is not None
            assert right.grad is not None
            assert param.grad.dtype == param.dtype
            # Sums of two in bfloat16 may round differently; a missing rank is far more.
            largest = float(right.grad.abs().max())
            torch.testing.assert_close(param.grad, right.grad, rtol=0, atol=0.02 * largest, msg=name)
        pair.update()


def test_buckets_and_views(wrap: str) -> None:
    fresh()
    for cap in (0.0001, 25):
        for view in (False, True):
            fresh()
            Pair(wrap=wrap, bucket_cap_mb=cap, gradient_as_bucket_view=view).train()


def every_rank(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


@run_on(weft=2, wrap=["ddp"], **LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **LONG)
def test_batch_norm(wrap: str) -> None:
    """Forward begins with rank 0's buffers, on every rank."""
    fresh()
    pair = Pair(models.normed, wrap)
    pair.train(steps=4)
    for name, buffer in inner(pair.under, wrap).named_buffers():
        assert torch.equal(buffer, inner(pair.plain, wrap).get_buffer(name)), name
    for model in (pair.plain, pair.under):
        model.eval()
    rows = make_rows(dist.get_rank(), 9)
    with torch.no_grad():
        assert torch.equal(pair.compiled(rows), pair.plain(rows))
    for name, buffer in inner(pair.under, wrap).named_buffers():
        assert all(torch.equal(buffer, other) for other in every_rank(buffer)), name


def branch_loss(*names_of_rank: str) -> Callable[..., Tensor]:
    """Each rank's own branches; the last entry is for all further ranks."""

    def loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
        rank = dist.get_rank() if rank is None else rank
        names = names_of_rank[min(rank, len(names_of_rank) - 1)]
        return model(make_rows(rank, salt), names).square().mean()

    return loss


@run_on(gloo=2, wrap=["replicate"], **LONG)
@run_on(gloo=2, wrap=["ddp"], full=True, **LONG)
@run_on(weft=2, wrap=WRAPS, full=True, **LONG)
def test_unused_parameters(wrap: str) -> None:
    """One that some rank used gets the mean, one that none used keeps its gradient: None stays None."""
    fresh()
    pair = Pair(models.branches, wrap)
    for salt, names in enumerate(
        [("ab", "ac"), ("ab", "ac"), ("b", "b"), ("a", ""), ("abc", "c"), ("a", "")]
    ):
        pair.step(salt, branch_loss(*names))


def test_unused_keeps_what_it_had(wrap: str) -> None:
    """Gradients are not zeroed: what no rank used is left as it is, the rest adds up."""
    fresh()
    pair = Pair(models.branches, wrap, is_exact=False)
    for salt, names in enumerate([("abc", "ab"), ("a", "b"), ("b", "b")]):
        pair.backward(salt, branch_loss(*names))
        pair.check()


def test_traced_backward_of_others(wrap: str) -> None:
    """Ranks use different parameters, and their backwards are traced: an error, and nothing is mixed up."""
    fresh()
    pair = Pair(models.branches, wrap)
    pair.step(0, branch_loss("abc", "abc"), kind="torch")
    with pytest.raises(Exception, match=r"different parameters|Attempt to trace generator"):
        pair.step(1, branch_loss("a", "c"), kind="torch")


def test_traced_backwards(wrap: str) -> None:
    """Models of every kind with a traced backward, half of them under each wrap."""
    fresh()
    if wrap == "ddp":
        Pair(models.checkpointed, wrap).train(kind="torch", steps=2)
        fresh()
        Pair(models.broken, wrap, fullgraph=False).train(kind="torch", steps=2)
        return
    for make in (models.tied, models.normed, models.frozen):
        fresh()
        Pair(make, wrap, gradient_as_bucket_view=True).train(kind="torch", steps=2)


def test_ranks_agree(wrap: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(steps=2)
    for name, param in inner(pair.under, wrap).named_parameters():
        assert all(torch.equal(param, other) for other in every_rank(param.detach())), name
