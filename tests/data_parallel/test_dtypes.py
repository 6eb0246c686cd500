"""Parameters of every dtype, size and memory layout.

Inputs are whole numbers, so that means over 2 or 4 ranks are exact in every dtype, half
precision included, and gradients can be compared to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import weft_only
from tests.data_parallel.twins import Twin, filled, make_rows, net, refusal_of
from tests.ranks import run_on

pytestmark = run_on(threads=2)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
VIEW = pytest.mark.parametrize("view", [False, pytest.param(True, marks=FULL)])
CAP = pytest.mark.parametrize("cap", [0.00001, pytest.param(25, marks=FULL)])


class Factors(nn.Module):
    """The sum of each parameter times numbers of its shape, which are its gradient (conjugated)."""

    def __init__(self, *params: torch.Tensor) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(param) for param in params)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for place, param in enumerate(self.params):
            total = total + (param * numbers_like(param, rank, step + place)).real.sum().double()
        return total


def numbers_like(param: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    numbers = torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)
    if param.is_complex():
        numbers = numbers + 1j * torch.randint(-8, 9, param.shape, generator=generator)
    return numbers


def train(model: nn.Module, steps: int = 3, **options: object) -> Twin:
    """Some steps, each gradient exactly the mean; the gradients of the last one stay."""
    twin = Twin(model, **options)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        twin.parallel.zero_grad()
        twin.single.zero_grad()
        twin.parallel(rank, step).backward()
        loss: Any = sum(twin.single(r, step) for r in range(world_size))
        (loss / world_size).backward()
        twin.check(tolerance=0.0)
    return twin


@VIEW
@CAP
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype: torch.dtype, view: bool, cap: float) -> None:
    params = [torch.ones(3, 4, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(2, 2, 2, dtype=dtype)]
    train(Factors(*params), gradient_as_bucket_view=view, bucket_cap_mb=cap)


@VIEW
@CAP
@run_on(threads=4)
def test_all_dtypes_in_one_model(view: bool, cap: float) -> None:
    params = [torch.ones(2 + i, 3, dtype=dtype) for i, dtype in enumerate(DTYPES * 2)]
    train(Factors(*params), gradient_as_bucket_view=view, bucket_cap_mb=cap)


@VIEW
def test_scalar_parameters(view: bool) -> None:
    train(Factors(torch.tensor(2.0), torch.ones(3), torch.tensor(1.0)), gradient_as_bucket_view=view)


@VIEW
def test_parameters_without_elements(view: bool) -> None:
    twin = train(Factors(torch.ones(0), torch.ones(3), torch.ones(2, 0, 4)), gradient_as_bucket_view=view)
    assert [list(param.grad.shape) for param in twin.parallel.parameters()] == [[0], [3], [2, 0, 4]]


def test_nothing_but_parameters_without_elements() -> None:
    train(Factors(torch.ones(0), torch.ones(0, 2)))


@VIEW
def test_one_parameter(view: bool) -> None:
    train(Factors(torch.ones(7)), gradient_as_bucket_view=view)


@VIEW
def test_thousands_of_tiny_parameters(view: bool) -> None:
    params = [torch.ones(1 + i % 3) for i in range(1000)]
    train(Factors(*params), steps=2, gradient_as_bucket_view=view, bucket_cap_mb=0.002)


@VIEW
def test_a_gradient_has_the_strides_of_its_parameter(view: bool) -> None:
    params = [
        torch.ones(3, 4).t(),
        torch.ones(2, 3, 4).permute(1, 2, 0),
        torch.ones(4, 3, 2, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
        torch.ones(5, 2),
    ]
    twin = train(Factors(*params), gradient_as_bucket_view=view)
    for param in twin.parallel.parameters():
        assert param.grad.stride() == param.stride()


@VIEW
def test_a_parameter_with_gaps_in_memory(view: bool) -> None:
    """A slice of a larger tensor: autograd gives it a gradient without gaps."""
    twin = train(Factors(torch.ones(6, 8)[:, ::2], torch.ones(3, 9)[:, 2:5]), gradient_as_bucket_view=view)
    for param in twin.parallel.parameters():
        assert param.grad.is_contiguous()


@VIEW
def test_channels_last_convolution(view: bool) -> None:
    model = filled(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)))
    model = model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        images = rows.reshape(len(rows), 2, 6, 6).contiguous(memory_format=torch.channels_last)
        return model(images).square().mean()

    twin = Twin(model, gradient_as_bucket_view=view)
    for step in range(3):
        twin.backward(make_rows(step, width=72), loss)
        twin.check()
        for param in twin.parallel.parameters():
            assert param.grad.stride() == param.stride()
        twin.update()


def test_an_lstm() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 4, num_layers=2, batch_first=True)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.lstm(rows.reshape(len(rows), 3, 2))[0][:, -1]

    twin = Twin(filled(Last()))
    for step in range(3):
        twin.step(make_rows(step))


@weft_only("leaves the gradients local, without a word")
def test_a_model_that_is_cast_after_wrapping_is_right_or_refused() -> None:
    """`.double()` swaps the memory of parameters that the buckets were planned for."""
    twin = Twin(net().float())
    twin.parallel.double()
    twin.single.double()
    refusal = refusal_of(lambda: twin.step(make_rows()))
    assert refusal is None or "dtype" in str(refusal)
