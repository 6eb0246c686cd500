"""A bucket in 16 bits within its own memory: nothing is overwritten before it is read."""

from __future__ import annotations

import pytest
import torch

from weft.comm_hooks.narrowing import narrow_quotients, widen


@pytest.mark.parametrize("numel", [1, 7, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_there_and_back_in_place(numel: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=wide)
    right = torch.div(values, 3).to(dtype)
    narrowed = narrow_quotients(values, 3, dtype)
    assert narrowed.data_ptr() == values.data_ptr()
    assert torch.equal(narrowed, right)
    assert widen(narrowed, values) is values
    assert torch.equal(values, right.to(wide))


def test_a_buffer_with_gaps_is_copied() -> None:
    values = torch.arange(20.0)[::2]
    narrowed = narrow_quotients(values, 2, torch.float16)
    assert values.tolist() == list(range(0, 20, 2))
    assert widen(narrowed, values).tolist() == list(range(10))


def test_an_empty_buffer() -> None:
    values = torch.empty(0)
    assert widen(narrow_quotients(values, 2, torch.bfloat16), values).numel() == 0
