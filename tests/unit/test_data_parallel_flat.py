"""The buffer of a bucket: gradients that are made in it beside those that are copied there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.data_parallel import flat_gradients
from weft.data_parallel.flat_gradients import FlatGradients
from weft.data_parallel.members import make_member
from weft.data_parallel.plan import plan_buckets, resolve_caps

SHAPES = [(130, 130), (3,), (2, 3), (140, 120)]  # the first and the last are large
EMPTY = torch.empty(0)


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> FlatGradients:
    def allocate(shape: Any, dtype: Any, device: Any, group: Any) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(flat_gradients.comm, "allocate", allocate)
    params = [torch.zeros(shape) for shape in SHAPES]
    members = [
        make_member(f"p{at}", param, is_sparse=False, is_delayed=False) for at, param in enumerate(params)
    ]
    (plan,) = plan_buckets([member.spec for member in members], range(len(params)), resolve_caps(100, None))
    return FlatGradients(plan, members, None)  # type: ignore[arg-type]


def as_it_lies(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape)


def turned(shape: tuple[int, ...]) -> torch.Tensor:
    """Its memory can't be read as one row."""
    return torch.randn(shape[::-1]).t() if len(shape) == 2 else torch.randn(shape)


@pytest.mark.parametrize("make", [as_it_lies, turned])
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
@pytest.mark.parametrize("placed", [set[int](), {0}, {3}, {0, 3}])
def test_filled(buffer: FlatGradients, make: Any, scale: float, placed: set[int]) -> None:
    grads = [make(shape) for shape in SHAPES]
    for at in placed:
        place, factor = buffer.place(at, scale)
        torch.mul(grads[at], factor, out=place)
    told = [EMPTY if at in placed else grad for at, grad in enumerate(grads)]
    buffer.fill(told, scale, placed)
    for view, grad in zip(buffer.views, grads, strict=True):
        assert torch.equal(view, grad * scale)
