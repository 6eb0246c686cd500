"""Quantizing row by row: the numbers of the reference, what is not finite, the error that is kept."""

from __future__ import annotations

import pytest
import torch

from weft.comm_hooks import quantize_cpu
from weft.comm_hooks.quantization_hooks import choose_codec
from weft.comm_hooks.quantize import LIMITS, TINY, Codec, Own, TorchCodec
from weft.comm_hooks.quantize_cpu import RowCodec
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients

DTYPE = pytest.mark.parametrize("dtype", list(LIMITS))
NUMEL, STARTS = 150_000, (0, 3, 9000, 80_000)


def make_plan(group_size: int = 2) -> QuantizePlan:
    return plan_gradients(NUMEL, group_size, STARTS, is_cpu=True)


def make_values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, plan: QuantizePlan, values: torch.Tensor, *, keeps_error: bool) -> torch.Tensor:
    """Quantize all chunks and restore them."""
    everyone = list(range(len(plan.chunks)))
    messages = torch.full((plan.message_bytes * len(everyone),), 77, dtype=torch.uint8)
    codec.quantize(values, messages, everyone, keeps_error=keeps_error)
    out = torch.full_like(values, 9.0)
    codec.restore(messages, out, everyone)
    return out


def assert_a_code_apart(seen: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """The same but for a number in ten thousand, which lay between two codes and went to the other one."""
    is_apart = (seen - right).abs() > 1e-5 * right.abs()
    assert is_apart.sum() <= 1e-4 * seen.numel()
    step = right.abs().max() / (127 if dtype is torch.int8 else 8)
    assert (seen - right).abs().max() <= step


@DTYPE
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("keeps_error", [False, True])
def test_the_numbers_are_the_references(dtype: torch.dtype, group_size: int, keeps_error: bool) -> None:
    plan = make_plan(group_size)
    ours, reference = make_values(1), make_values(1)
    seen = round_trip(RowCodec(plan, dtype), plan, ours, keeps_error=keeps_error)
    right = round_trip(TorchCodec(plan, dtype), plan, reference, keeps_error=keeps_error)
    assert_a_code_apart(seen, right, dtype)
    if keeps_error:
        torch.testing.assert_close(seen + ours, make_values(1), rtol=0, atol=2e-6)
    else:
        assert torch.equal(ours, make_values(1))


@DTYPE
@pytest.mark.parametrize("num_peers", [1, 3])
@pytest.mark.parametrize("keeps_error", [False, True])
def test_messages_add_up_to_the_references_mean(
    dtype: torch.dtype, num_peers: int, keeps_error: bool
) -> None:
    plan = make_plan(num_peers + 1)
    received = torch.empty(plan.message_bytes * num_peers, dtype=torch.uint8)
    for peer, part in enumerate(received.chunk(num_peers)):
        TorchCodec(plan, dtype).quantize(make_values(peer + 1), part, [0], keeps_error=False)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for codec in (RowCodec(plan, dtype), TorchCodec(plan, dtype)):
        means = torch.zeros(plan.message_bytes * (num_peers + 1), dtype=torch.uint8)
        total, written, out = make_values(0), torch.zeros(NUMEL), torch.zeros(NUMEL)
        codec.fold(total, received, Own(0, means[: plan.message_bytes], written), keeps_error=keeps_error)
        codec.restore(means, out, [0])
        # What the adder writes for itself is what everyone else reads, bit for bit.
        assert torch.equal(out, written)
        found.append((out, total))
    assert_a_code_apart(found[0][0], found[1][0], dtype)
    if keeps_error:
        sums = [mean * (num_peers + 1) + error for mean, error in found]
        torch.testing.assert_close(sums[0], sums[1], rtol=0, atol=5e-6)


@DTYPE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_row_only(bad: float, dtype: torch.dtype) -> None:
    values = make_values(2)
    values[5000] = bad
    plan = make_plan(1)
    out = round_trip(RowCodec(plan, dtype), plan, values, keeps_error=True)
    assert not out[3:9000].isfinite().any()
    assert out[:3].isfinite().all()
    assert out[9000:].isfinite().all()
    # An error that is not finite would spoil every step to come.
    assert not values[3:9000].any()


@DTYPE
@pytest.mark.parametrize("size", [0.0, 1e-45, TINY / 2, TINY * 2, 1e38, 3.4e38])
def test_numbers_of_any_size(size: float, dtype: torch.dtype) -> None:
    values = torch.full((5000,), size)
    values[5], values[6] = -size, 0.0
    plan = plan_gradients(5000, 1, (0,), is_cpu=True)
    out = round_trip(RowCodec(plan, dtype), plan, values.clone(), keeps_error=False)
    torch.testing.assert_close(out, values, rtol=1e-6, atol=TINY / 127)
    assert out[6] == 0


def test_ties_go_to_even_and_no_code_wraps() -> None:
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, -0.5, -1.5, 126.4, -126.6, 0.49])
    plan = plan_gradients(9, 1, (0,))
    out = round_trip(RowCodec(plan, torch.int8), plan, values, keeps_error=False)
    assert out.tolist() == [127, -127, 0, 2, 0, -2, 126, -127, 0]


def test_long_rows_of_float32_go_row_by_row() -> None:
    long, short = make_plan(), plan_blocks(NUMEL, 2, 512)
    values = make_values(0)
    assert isinstance(choose_codec(long, torch.int8, values), RowCodec)
    assert isinstance(choose_codec(short, torch.int8, values), TorchCodec)
    assert not quantize_cpu.is_usable(values.double(), long)
