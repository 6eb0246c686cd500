"""How parameters lie in a compiled graph's collectives: any shape, any dim, any number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from weft.fsdp.compile import TracedLayout
from weft.fsdp.placement import ShardLayout

SHAPES = [((6, 4), 0), ((5, 3), 0), ((3, 5), 1), ((1, 7), 1), ((2, 5, 3), 1), ((1,), 0), ((7,), 0)]


def make_layout(
    num_ranks: int, rank: int = 0, shapes: list[tuple[tuple[int, ...], int]] = SHAPES
) -> TracedLayout:
    layouts = tuple(ShardLayout(shape, dim, num_ranks) for shape, dim in shapes)
    dtypes = (torch.float32, torch.float32, torch.float32)
    return TracedLayout(layouts, rank, num_ranks, "0", *dtypes, "sum", 1.0, float(num_ranks))


def make_tensors(layout: TracedLayout) -> list[torch.Tensor]:
    return [torch.randn(one.shape) for one in layout.layouts]


def shards_of(full: list[torch.Tensor], layout: TracedLayout) -> list[torch.Tensor]:
    return [
        tensor.narrow(one.dim, *one.span(layout.rank))
        for tensor, one in zip(full, layout.layouts, strict=True)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[2:3]])
def test_shards_become_full_parameters(num_ranks: int, shapes: list[tuple[tuple[int, ...], int]]) -> None:
    traced = [make_layout(num_ranks, rank, shapes) for rank in range(num_ranks)]
    full = make_tensors(traced[0])
    table = torch.cat([layout.pack_shard(shards_of(full, layout)) for layout in traced])
    for found, right in zip(traced[0].unpack_table(table), full, strict=True):
        assert torch.equal(found, right)
        assert found.is_contiguous()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_gradients_become_means_of_shards(num_ranks: int) -> None:
    traced = [make_layout(num_ranks, rank) for rank in range(num_ranks)]
    grads = [make_tensors(layout) for layout in traced]
    tables = [layout.pack_table(mine, mine[0]) for layout, mine in zip(traced, grads, strict=True)]
    total = torch.stack(tables).sum(0).view(num_ranks, -1)
    means = [torch.stack(parts).sum(0) / num_ranks for parts in zip(*grads, strict=True)]
    for layout, shard in zip(traced, total, strict=True):
        wanted = shards_of(means, layout)
        for found, right in zip(layout.unpack_shard(shard), wanted, strict=True):
            torch.testing.assert_close(found, right)


def test_nothing_counts_as_zeros() -> None:
    layout = make_layout(2)
    grads = make_tensors(layout)
    zeros = [torch.zeros_like(grad) if at % 2 else grad for at, grad in enumerate(grads)]
    missing = [None if at % 2 else grad for at, grad in enumerate(grads)]
    assert torch.equal(layout.pack_table(missing, grads[0]), layout.pack_table(zeros, grads[0]))


def test_dtypes_on_the_way() -> None:
    layout = dataclasses.replace(make_layout(2), compute_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    full = make_tensors(layout)
    assert layout.pack_shard(shards_of(full, layout)).dtype is torch.bfloat16
    table = layout.pack_table([tensor.bfloat16() for tensor in full], full[0])
    assert table.dtype is torch.float64
    assert {grad.dtype for grad in layout.unpack_shard(table.view(2, -1)[0])} == {torch.float32}


def test_only_some() -> None:
    layout = make_layout(2)
    wanted = [at % 2 == 0 for at in range(len(SHAPES))]
    assert layout.only(wanted) == make_layout(2, shapes=SHAPES[::2])


def test_text_says_all() -> None:
    layout = make_layout(3, rank=1)
    assert TracedLayout.decode(layout.encode()) == layout
