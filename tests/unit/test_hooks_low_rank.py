"""Orthonormal columns, for matrices of every kind; directions that must not be lost."""

from __future__ import annotations

import pytest
import torch

from weft.comm_hooks.low_rank import keep_directions, orthonormalize


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_columns_become_orthonormal_and_span_the_same(
    rank: int, dtype: torch.dtype, tolerance: float
) -> None:
    matrices = draw(3, 20, rank, dtype=dtype)
    before = matrices.clone()
    orthonormalize(matrices)
    products = matrices.transpose(1, 2) @ matrices
    torch.testing.assert_close(
        products, torch.eye(rank, dtype=dtype).expand(3, rank, rank), rtol=0, atol=tolerance
    )
    # Projected on the columns nothing of the old ones is lost.
    projected = matrices @ (matrices.transpose(1, 2) @ before)
    torch.testing.assert_close(projected, before, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_16_bit_matrices_do_not_overflow(dtype: torch.dtype, rank: int) -> None:
    matrices = draw(1, 30, rank).mul(1000).to(dtype)  # squares of these are past float16
    orthonormalize(matrices)
    products = (matrices.transpose(1, 2) @ matrices).float()
    torch.testing.assert_close(products, torch.eye(rank).unsqueeze(0), rtol=0, atol=0.05)


@pytest.mark.parametrize("rank", [2, 4])
def test_columns_that_depend_on_each_other_become_orthonormal(rank: int) -> None:
    """A gradient of rank 1, as of a batch of one row: its P has parallel columns."""
    matrices = draw(2, 40, 1) @ draw(2, 1, rank)
    orthonormalize(matrices)
    products = matrices.transpose(1, 2) @ matrices
    torch.testing.assert_close(products, torch.eye(rank).expand(2, rank, rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_matrix_of_zeros_stays_one(rank: int) -> None:
    matrices = torch.zeros(1, 6, rank)
    orthonormalize(matrices)
    assert not matrices.any()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_column_without_direction_keeps_the_old_one(bad: float) -> None:
    new, old = draw(1, 5, 2), draw(1, 5, 2) + 1
    new[0, :, 1] = bad
    kept = keep_directions(new, old)
    assert torch.equal(kept[0, :, 0], new[0, :, 0])
    assert torch.equal(kept[0, :, 1], old[0, :, 1])
