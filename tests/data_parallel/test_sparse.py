"""Sparse gradients: Embedding and EmbeddingBag, on any backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel.libraries import DistributedDataParallel, weft_only
from tests.data_parallel.models import WORD_WIDTH, WORDS, Embedded, tokens_of
from tests.data_parallel.twins import Twin, assert_same_gradients, filled
from tests.ranks import run_on

pytestmark = [
    run_on(threads=2),
    run_on(gloo_threads=2, full=True),
    run_on(weft=2, gloo=2, full=True),
]


def backward(twin: Twin, step: int, tables: Callable[[int], str]) -> None:
    ranks = range(dist.get_world_size())
    losses = [twin.single(tokens_of(r, step), tables(r)).square().mean() for r in ranks]
    torch.stack(losses).mean().backward()
    rank = dist.get_rank()
    twin.parallel(tokens_of(rank, step), tables(rank)).square().mean().backward()


def train(tables: Callable[[int], str], **options: object) -> None:
    twin = Twin(Embedded(), **options)
    for step in range(3):
        backward(twin, step, tables)
        twin.check()
        twin.update()


@run_on(threads=2, gloo_threads=2)
@run_on(weft=2, gloo=2, full=True)
def test_sparse_and_dense() -> None:
    for view in (False, True):
        for cap in (0.00001, 25):
            train(lambda rank: "ab", gradient_as_bucket_view=view, bucket_cap_mb=cap)


def test_gradients_stay_sparse() -> None:
    twin = Twin(Embedded())
    for step in range(2):
        backward(twin, step, lambda rank: "ab")
        assert twin.parallel.module.a.weight.grad.layout is torch.sparse_coo
        assert twin.parallel.module.b.weight.grad.layout is torch.sparse_coo
        assert twin.parallel.module.last.weight.grad.layout is torch.strided
        twin.update()


def test_accumulated() -> None:
    twin = Twin(Embedded())
    with twin.parallel.no_sync():
        backward(twin, 0, lambda rank: "ab")
    backward(twin, 1, lambda rank: "ab")
    twin.check()
    backward(twin, 2, lambda rank: "ab")
    twin.check()


@weft_only("raises")
def test_used_by_some_ranks() -> None:
    train(lambda rank: "a" if rank == 0 else "b", find_unused_parameters=True)


@weft_only("raises")
def test_used_by_nobody() -> None:
    train(lambda rank: "b", find_unused_parameters=True)


def test_ranks_with_no_tokens() -> None:
    """A rank may look nothing up: an empty batch has a sparse gradient of no entries."""
    twin = Twin(Embedded())
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for step in range(2):
        parts = [tokens_of(r, step)[: 0 if r == 1 else 3] for r in ranks]
        torch.stack([twin.single(part, "ab").square().sum() for part in parts]).mean().backward()
        twin.parallel(parts[rank], "ab").square().sum().backward()
        twin.check()
        twin.update()


class LookedUp(nn.Module):
    """A sparse gradient that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WORDS, WORD_WIDTH, dtype=torch.float64))
        self.last = filled(nn.Linear(WORD_WIDTH, 3))

    def forward(self, tokens: torch.Tensor, tables: str) -> torch.Tensor:
        return self.last(nn.functional.embedding(tokens, self.table, sparse=True).sum(1))


@weft_only("raises")
def test_unannounced() -> None:
    """It may come back dense: what matters is that it is right."""
    twin = Twin(LookedUp())
    for step in range(2):
        backward(twin, step, lambda rank: "")
        dense = [param.grad.to_dense() for param in (twin.parallel.module.table, twin.single.table)]
        torch.testing.assert_close(*dense, rtol=1e-12, atol=1e-14)
        assert_same_gradients(twin.parallel.module.last, twin.single.last)
        twin.update()


def test_a_dense_table_is_no_trouble() -> None:
    model = Embedded()
    model.a.sparse = model.b.sparse = False
    twin = Twin(model)
    for step in range(2):
        backward(twin, step, lambda rank: "ab")
        assert twin.parallel.module.a.weight.grad.layout is torch.strided
        twin.check()
        twin.update()


def test_in_a_wrapped_child() -> None:
    """The table itself is what is wrapped."""
    table = filled(nn.EmbeddingBag(WORDS, WORD_WIDTH, mode="sum", sparse=True))
    twin = Twin(table, wrap=DistributedDataParallel)
    ranks = range(dist.get_world_size())
    for step in range(2):
        torch.stack([twin.single(tokens_of(r, step)).square().mean() for r in ranks]).mean().backward()
        twin.parallel(tokens_of(dist.get_rank(), step)).square().mean().backward()
        twin.check()
        twin.update()
