"""Triton's kernels against torch's operations on the CPU: the same codes, scales and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.comm_hooks.quantize import LIMITS, Own, TorchCodec
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PLANS = {
    "blocks of 512": (plan_blocks, 512),
    "blocks of 100": (plan_blocks, 100),
    "blocks of 2048": (plan_blocks, 2048),
    "gradients": (plan_gradients, (0, 7, 300, 301, 5000)),
}
PLAN = pytest.mark.parametrize("kind", sorted(PLANS))
SIZE = pytest.mark.parametrize("numel", [1, 6000, 300_001])
WIRE = pytest.mark.parametrize("wire", list(LIMITS), ids=str)
PAIRS = [  # not all: each is a kernel to be compiled
    (torch.int8, torch.float32),
    (torch.int8, torch.float16),
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
]
PAIR = pytest.mark.parametrize(("wire", "dtype"), PAIRS, ids=str)


def make_plan(kind: str, numel: int, group_size: int) -> QuantizePlan:
    plan, argument = PLANS[kind]
    return plan(numel, group_size, argument)  # type: ignore[operator]


def codecs(plan: QuantizePlan, wire: torch.dtype) -> tuple[Any, Any]:
    from weft.comm_hooks import quantize_triton

    if not quantize_triton.is_usable(plan, torch.empty(1, device=DEVICE), wire):
        pytest.skip(f"this GPU has no {wire}")
    return Reference(plan, wire), quantize_triton.TritonCodec(plan, wire)


class Reference:
    """torch's operations on the CPU, where a division is one: torch's on a GPU multiply by an inverse."""

    def __init__(self, plan: QuantizePlan, wire: torch.dtype) -> None:
        self._codec = TorchCodec(plan, wire)

    def quantize(
        self, values: torch.Tensor, messages: torch.Tensor, chunks: list[int], *, keeps_error: bool
    ) -> None:
        on_cpu = values.cpu(), messages.cpu()
        self._codec.quantize(*on_cpu, chunks, keeps_error=keeps_error)
        values.copy_(on_cpu[0])
        messages.copy_(on_cpu[1])

    def fold(self, values: torch.Tensor, received: torch.Tensor, own: Own, *, keeps_error: bool) -> None:
        on_cpu, mine = values.cpu(), Own(own.chunk, own.message.cpu(), own.out.cpu())
        self._codec.fold(on_cpu, received.cpu(), mine, keeps_error=keeps_error)
        values.copy_(on_cpu)
        own.message.copy_(mine.message)
        own.out.copy_(mine.out)

    def add_up(self, values: torch.Tensor, received: torch.Tensor, chunk: int, out: torch.Tensor) -> None:
        on_cpu = out.cpu()
        self._codec.add_up(values.cpu(), received.cpu(), chunk, on_cpu)
        out.copy_(on_cpu)

    def restore(self, messages: torch.Tensor, out: torch.Tensor, chunks: list[int]) -> None:
        on_cpu = out.cpu()
        self._codec.restore(messages.cpu(), on_cpu, chunks)
        out.copy_(on_cpu)


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(
        -6, 3, (numel,), generator=generator
    )
    values[:: 13 + seed] = 0.0
    return values.to(dtype).to(DEVICE)


def empty_messages(plan: QuantizePlan, count: int) -> torch.Tensor:
    return torch.zeros(plan.message_bytes * count, dtype=torch.uint8, device=DEVICE)


def assert_same_messages(
    plan: QuantizePlan, seen: torch.Tensor, right: torch.Tensor, wire: torch.dtype
) -> None:
    """Scales to the bit; codes too, but for a few that a fused multiplication rounds the other way."""
    for a, b in zip(seen.split(plan.message_bytes), right.split(plan.message_bytes), strict=True):
        a_scales, b_scales = (m[plan.scales_start :].view(torch.float32) for m in (a, b))
        assert torch.equal(a_scales, b_scales)
        a_codes, b_codes = (m[: plan.scales_start].view(wire).float() for m in (a, b))
        apart = (a_codes != b_codes).sum().item()
        assert apart <= 1e-4 * plan.scales_start
        step = 1.0 if wire is torch.int8 else 32.0
        assert ((a_codes - b_codes).abs() <= step).all()


@PLAN
@SIZE
@PAIR
@pytest.mark.parametrize("keeps_error", [False, True])
def test_quantize(kind: str, numel: int, wire: torch.dtype, dtype: torch.dtype, keeps_error: bool) -> None:
    if keeps_error and dtype is not torch.float32:
        pytest.skip("errors are float32")
    plan = make_plan(kind, numel, 3)
    chunks = [0, 2]
    seen, right = empty_messages(plan, 2), empty_messages(plan, 2)
    values = [draw(numel, 1, dtype) for _ in range(2)]
    for codec, messages, given in zip(codecs(plan, wire), (right, seen), values, strict=True):
        codec.quantize(given, messages, chunks, keeps_error=keeps_error)
    assert_same_messages(plan, seen, right, wire)
    if keeps_error:
        before = draw(numel, 1)
        restored = torch.zeros(numel, device=DEVICE)
        whole = torch.cat([seen[: plan.message_bytes], empty_messages(plan, 1), seen[plan.message_bytes :]])
        codecs(plan, wire)[1].restore(whole, restored, [0, 1, 2])
        for which in chunks:
            chunk = plan.chunks[which]
            part = slice(chunk.start, chunk.start + chunk.numel)
            bound = before[part].abs() * 1e-6 + restored[part].abs() * 1e-6
            assert ((restored + values[1] - before)[part].abs() <= bound).all()


@PLAN
@SIZE
@PAIR
@pytest.mark.parametrize("num_peers", [1, 3])
def test_fold(kind: str, numel: int, wire: torch.dtype, dtype: torch.dtype, num_peers: int) -> None:
    plan = make_plan(kind, numel, num_peers + 1)
    reference, ours = codecs(plan, wire)
    received = empty_messages(plan, num_peers)
    for peer in range(num_peers):
        message = received[peer * plan.message_bytes : (peer + 1) * plan.message_bytes]
        reference.quantize(draw(numel, 2 + peer, dtype), message, [0], keeps_error=False)
    outs: list[torch.Tensor] = []
    for codec in (reference, ours):
        own = Own(0, empty_messages(plan, 1), torch.zeros(numel, device=DEVICE, dtype=dtype))
        codec.fold(draw(numel, 1, dtype), received, own, keeps_error=dtype is torch.float32)
        out = torch.zeros(numel, device=DEVICE, dtype=dtype)
        reference.restore(torch.cat([own.message, empty_messages(plan, num_peers)]), out, [0])
        assert torch.equal(out, own.out)
        outs.append(out[: plan.chunks[0].numel].float())
    # Sums differ by roundings (a fused multiply-add), and so may a code by one step.
    apart = (outs[0] - outs[1]).abs()
    largest = torch.cat([draw(numel, 1 + peer, dtype).float().abs() for peer in range(num_peers + 1)]).max()
    assert (apart > largest * 1e-6).float().mean() <= 1e-3
    assert (apart <= largest / (100 if wire is torch.int8 else 8)).all()


@PLAN
@SIZE
@PAIR
@pytest.mark.parametrize("num_peers", [1, 3])
def test_add_up(kind: str, numel: int, wire: torch.dtype, dtype: torch.dtype, num_peers: int) -> None:
    """The last chunk, in place, and nothing beside it."""
    plan = make_plan(kind, numel, num_peers + 1)
    last = max(at for at, chunk in enumerate(plan.chunks) if chunk.numel)
    chunk = plan.chunks[last]
    reference, ours = codecs(plan, wire)
    received = empty_messages(plan, num_peers)
    for peer in range(num_peers):
        message = received[peer * plan.message_bytes : (peer + 1) * plan.message_bytes]
        reference.quantize(draw(numel, 2 + peer, dtype), message, [last], keeps_error=False)
    outs = [draw(numel, 1, dtype) for _ in range(2)]
    for codec, out in zip((reference, ours), outs, strict=True):
        codec.add_up(out, received, last, out)
    assert torch.equal(outs[1][: chunk.start], draw(numel, 1, dtype)[: chunk.start])
    # Sums differ by roundings: a fused multiply-add.
    largest = torch.cat([draw(numel, 1 + peer, dtype).float().abs() for peer in range(num_peers + 1)]).max()
    apart = (outs[0].float() - outs[1].float()).abs()
    assert (apart <= largest * 1e-6 + outs[0].float().abs() * torch.finfo(dtype).eps).all()


@PLAN
@SIZE
@PAIR
def test_restore(kind: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
    plan = make_plan(kind, numel, 3)
    reference, ours = codecs(plan, wire)
    messages = empty_messages(plan, 3)
    reference.quantize(draw(numel, 1, dtype), messages, [0, 1, 2], keeps_error=False)
    outs = [torch.full((numel,), 9.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    reference.restore(messages, outs[0], [0, 1, 2])
    ours.restore(messages, outs[1], [0, 1, 2])
    assert torch.equal(outs[0], outs[1])


@WIRE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_its_row_only(bad: float, wire: torch.dtype) -> None:
    plan = plan_blocks(2048, 1, 512)
    _, ours = codecs(plan, wire)
    values = torch.ones(2048, device=DEVICE)
    values[700] = bad
    messages, out = empty_messages(plan, 1), torch.zeros(2048, device=DEVICE)
    ours.quantize(values, messages, [0], keeps_error=True)
    ours.restore(messages, out, [0])
    assert not out[512:1024].isfinite().any()
    assert torch.allclose(out[:512], torch.ones(512, device=DEVICE))
    assert values.isfinite().all()


@WIRE
def test_zeros_stay_exactly_zero(wire: torch.dtype) -> None:
    plan = plan_blocks(2000, 2, 512)
    _, ours = codecs(plan, wire)
    messages, out = empty_messages(plan, 2), torch.ones(2000, device=DEVICE)
    ours.quantize(torch.zeros(2000, device=DEVICE), messages, [0, 1], keeps_error=False)
    ours.restore(messages, out, [0, 1])
    assert not out.any()
