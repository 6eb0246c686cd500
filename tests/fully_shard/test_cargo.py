"""How parameters lie in a compiled graph's collectives: any shape, any dim, any number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from weft.fsdp.cargo import Cargo
from weft.fsdp.split import Split

SHAPES = [((6, 4), 0), ((5, 3), 0), ((3, 5), 1), ((1, 7), 1), ((2, 5, 3), 1), ((1,), 0), ((7,), 0)]


def make_cargo(num_ranks: int, rank: int = 0, shapes: list[tuple[tuple[int, ...], int]] = SHAPES) -> Cargo:
    splits = tuple(Split(shape, dim, num_ranks) for shape, dim in shapes)
    dtypes = (torch.float32, torch.float32, torch.float32)
    return Cargo(splits, rank, num_ranks, "0", *dtypes, "sum", 1.0, float(num_ranks))


def make_tensors(cargo: Cargo) -> list[torch.Tensor]:
    return [torch.randn(split.shape) for split in cargo.splits]


def pieces_of(wholes: list[torch.Tensor], cargo: Cargo) -> list[torch.Tensor]:
    return [
        whole.narrow(split.dim, *split.span(cargo.rank))
        for whole, split in zip(wholes, cargo.splits, strict=True)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[2:3]])
def test_shards_become_whole(num_ranks: int, shapes: list[tuple[tuple[int, ...], int]]) -> None:
    cargos = [make_cargo(num_ranks, rank, shapes) for rank in range(num_ranks)]
    wholes = make_tensors(cargos[0])
    table = torch.cat([cargo.pack_shard(pieces_of(wholes, cargo)) for cargo in cargos])
    for found, right in zip(cargos[0].unpack_table(table), wholes, strict=True):
        assert torch.equal(found, right)
        assert found.is_contiguous()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_gradients_become_means_of_pieces(num_ranks: int) -> None:
    cargos = [make_cargo(num_ranks, rank) for rank in range(num_ranks)]
    grads = [make_tensors(cargo) for cargo in cargos]
    tables = [cargo.pack_table(mine, mine[0]) for cargo, mine in zip(cargos, grads, strict=True)]
    total = torch.stack(tables).sum(0).view(num_ranks, -1)
    means = [torch.stack(parts).sum(0) / num_ranks for parts in zip(*grads, strict=True)]
    for cargo, shard in zip(cargos, total, strict=True):
        wanted = pieces_of(means, cargo)
        for found, right in zip(cargo.unpack_shard(shard), wanted, strict=True):
            torch.testing.assert_close(found, right)


def test_nothing_counts_as_zeros() -> None:
    cargo = make_cargo(2)
    grads = make_tensors(cargo)
    zeros = [torch.zeros_like(grad) if at % 2 else grad for at, grad in enumerate(grads)]
    missing = [None if at % 2 else grad for at, grad in enumerate(grads)]
    assert torch.equal(cargo.pack_table(missing, grads[0]), cargo.pack_table(zeros, grads[0]))


def test_dtypes_on_the_way() -> None:
    cargo = dataclasses.replace(make_cargo(2), compute_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    wholes = make_tensors(cargo)
    assert cargo.pack_shard(pieces_of(wholes, cargo)).dtype is torch.bfloat16
    table = cargo.pack_table([whole.bfloat16() for whole in wholes], wholes[0])
    assert table.dtype is torch.float64
    assert {grad.dtype for grad in cargo.unpack_shard(table.view(2, -1)[0])} == {torch.float32}


def test_only_some() -> None:
    cargo = make_cargo(2)
    wanted = [at % 2 == 0 for at in range(len(SHAPES))]
    assert cargo.only(wanted) == make_cargo(2, shapes=SHAPES[::2])


def test_text_says_all() -> None:
    cargo = make_cargo(3, rank=1)
    assert Cargo.decode(cargo.encode()) == cargo
