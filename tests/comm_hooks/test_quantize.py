"""Quantizing on one rank: bounds of the error, zeros, what is not finite, and the error that is kept."""

from __future__ import annotations

import pytest
import torch

from weft.comm_hooks.quantize import LIMITS, TINY, Own, TorchCodec
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients

INT8 = torch.int8
DTYPES = list(LIMITS)


def round_trip(
    values: torch.Tensor, plan: QuantizePlan, dtype: torch.dtype = INT8, *, keeps_error: bool = False
) -> torch.Tensor:
    """Quantize all chunks and restore them."""
    codec = TorchCodec(plan, dtype)
    messages = torch.full((plan.message_bytes * len(plan.chunks),), 77, dtype=torch.uint8)
    codec.quantize(values, messages, list(range(len(plan.chunks))), keeps_error=keeps_error)
    out = torch.full_like(values, 9.0)
    codec.restore(messages, out, list(range(len(plan.chunks))))
    return out


def largest_of_row(values: torch.Tensor, plan: QuantizePlan) -> torch.Tensor:
    """For each number the largest absolute value of its row."""
    largest = torch.empty(values.numel(), dtype=torch.float64)
    for chunk in plan.chunks:
        for run in chunk.runs:
            for row in range(run.num_rows):
                start = chunk.start + run.start + row * run.row_numel
                largest[start : start + run.row_numel] = values[start : start + run.row_numel].abs().max()
    return largest


@pytest.mark.parametrize(
    ("numel", "block"),
    [(1, 512), (15, 1), (511, 512), (513, 100), (2000, 1), (40_000, 512), (300_000, 512), (300_000, 200_000)],
)
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_the_error_is_at_most_half_a_scale(numel: int, group_size: int, block: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    plan = plan_blocks(numel, group_size, block)
    apart = (round_trip(values, plan) - values).double().abs()
    # Half a scale, and the roundings of scale, factor and product.
    assert (apart <= largest_of_row(values, plan) * (0.5 / 127 + 2**-21)).all()


def test_fp8_keeps_three_bits_of_each_number() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    plan = plan_blocks(5000, 2, 512)
    apart = (round_trip(values, plan, torch.float8_e4m3fn) - values).double().abs()
    smallest_step = largest_of_row(values, plan) / 448 * 2**-9
    assert (apart <= values.double().abs() * (2**-4 + 2**-20) + smallest_step).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_has_scales_of_its_own(dtype: torch.dtype) -> None:
    small, large = torch.full((50,), 1e-6), torch.full((70,), 1e3)
    values = torch.cat([small, large])
    out = round_trip(values, plan_gradients(120, 2, (0, 50)), dtype)
    torch.testing.assert_close(out, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zeros_stay_exactly_zero(dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    values = torch.zeros(2048, dtype=value_dtype)
    values[1024:] = torch.randn(1024, generator=torch.Generator().manual_seed(5))
    values[1500] = 0.0
    out = round_trip(values, plan_blocks(2048, 2, 512), dtype)
    assert not out[:1024].any()
    assert out[1500] == 0
    assert out[1024:].any()


@pytest.mark.parametrize("size", [1e-45, 1e-38, TINY / 1000, TINY / 2, TINY * 2, 1e38, 3.4e38])
def test_numbers_of_any_size(size: float) -> None:
    values = torch.full((64,), size)
    values[5] = -size
    out = round_trip(values, plan_blocks(64, 1, 64))
    torch.testing.assert_close(out, values, rtol=1e-6, atol=TINY / 127)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_its_row_only(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(1024)
    values[700] = bad
    out = round_trip(values, plan_blocks(1024, 1, 512), dtype)
    assert not out[512:].isfinite().any()
    torch.testing.assert_close(out[:512], values[:512])


@pytest.mark.parametrize("value_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_quantized_too(value_dtype: torch.dtype) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(2)).to(value_dtype)
    plan = plan_blocks(3000, 2, 512)
    out = round_trip(values, plan)
    assert out.dtype == value_dtype
    own_rounding = torch.finfo(value_dtype).eps
    bound = largest_of_row(values.double(), plan) * (0.5 / 127 + 2**-21 + own_rounding)
    assert ((out.double() - values.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_what_the_message_fails_to_say(dtype: torch.dtype) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    kept = values.clone()
    out = round_trip(kept, plan_blocks(3000, 2, 512), dtype, keeps_error=True)
    torch.testing.assert_close(out + kept, values, rtol=0, atol=1e-6)
    assert kept.abs().max() > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_error_is_kept_of_what_is_not_finite(dtype: torch.dtype) -> None:
    values = torch.ones(1024)
    values[3] = float("inf")
    values[600] = float("nan")
    round_trip(values, plan_blocks(1024, 1, 512), dtype, keeps_error=True)
    assert values.isfinite().all()


@pytest.mark.parametrize("num_peers", [1, 3])
def test_messages_add_up_to_the_mean(num_peers: int) -> None:
    plan = plan_blocks(4000, num_peers + 1, 512)
    codec = TorchCodec(plan, INT8)
    all_values = [
        torch.randn(4000, generator=torch.Generator().manual_seed(peer)) for peer in range(num_peers + 1)
    ]
    received = torch.empty(plan.message_bytes * num_peers, dtype=torch.uint8)
    heard = [all_values[0].double()]
    for peer, part in enumerate(received.chunk(num_peers)):
        values = all_values[peer + 1]
        codec.quantize(values, part, [0], keeps_error=False)
        heard.append(round_trip(values, plan).double())
    means = torch.zeros(plan.message_bytes * (num_peers + 1), dtype=torch.uint8)
    total = all_values[0].clone()
    written = torch.zeros(4000)
    codec.fold(total, received, Own(0, means[: plan.message_bytes], written), keeps_error=True)
    out = torch.zeros(4000)
    codec.restore(means, out, [0])
    assert torch.equal(out, written)
    own = slice(0, plan.chunks[0].numel)
    right = torch.stack(heard).sum(0)[own]
    # The error that is left belongs to the sum: with it the mean is exact.
    torch.testing.assert_close(
        out.double()[own] * (num_peers + 1) + total.double()[own], right, rtol=0, atol=5e-6
    )
