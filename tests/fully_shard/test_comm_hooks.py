"""Gradient hooks on buckets in parts: this rank's part of the mean, for the traffic of a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.comm_hooks.buckets import Shapes, assert_within, every_rank, make_bucket, run
from tests.fully_shard.hook_bounds import (
    PIECES,
    QUANTIZING_HOOKS,
    bucket_in_parts,
    float_bound,
    numel_of,
    of_every_rank,
    ops,
    sent_bound,
)
from tests.ranks import run_on
from weft import fully_shard
from weft.comm_hooks import chain
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from weft.comm_hooks.quantize_plan import plan_blocks, plan_gradients

QUANTIZING = pytest.mark.parametrize("hook", QUANTIZING_HOOKS)


@run_on(threads=(2, 3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_the_plain_mean_is_exact(dtype: torch.dtype) -> None:
    """To the bit, of multiples of the number of ranks: their quotients and sums are integers."""
    size = dist.get_world_size()
    bucket = bucket_in_parts(dtype=dtype)
    whole = [
        torch.randint(-9, 9, bucket.buffer().shape, generator=torch.Generator().manual_seed(rank)) * size
        for rank in range(size)
    ]
    bucket.buffer().copy_(whole[dist.get_rank()])
    if dtype.is_complex:
        bucket.buffer().mul_(1 - 2j)
    result = run(allreduce_hook, None, bucket)
    total: Any = sum(whole)
    right = (total // size).to(dtype) * ((1 - 2j) if dtype.is_complex else 1)
    assert torch.equal(bucket.wanted_part(result), bucket.wanted_part(right))


@run_on(threads=(2, 3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_16_bits(dtype: torch.dtype) -> None:
    for narrow, hook in ((torch.float16, fp16_compress_hook), (torch.bfloat16, bf16_compress_hook)):
        bucket = bucket_in_parts(dtype=dtype)
        every = torch.stack([bucket.wanted_part(row) for row in of_every_rank(bucket, dtype=dtype)])
        bits, least = (11, 2.0**-25) if narrow is torch.float16 else (8, 0.0)
        seen = bucket.wanted_part(run(hook, None, bucket))
        assert seen.dtype == dtype
        assert_within(seen, every.mean(0), float_bound(every, bits, least))


def check_quantized_means(wire: torch.dtype, dtype: torch.dtype, pieces: Shapes = PIECES) -> None:
    for hook in QUANTIZING_HOOKS:
        bucket = bucket_in_parts(pieces=pieces, dtype=dtype)
        every = of_every_rank(bucket, dtype=dtype)
        bound = bucket.wanted_part(sent_bound(hook, bucket, every, wire))
        right = bucket.wanted_part(every.mean(0))
        if dtype.itemsize == 2:
            bound = bound + (right.abs() + bound) * torch.finfo(dtype).eps
        result = run(hook, QuantizationState(dtype=wire), bucket)
        assert_within(bucket.wanted_part(result), right, bound)


@run_on(threads=(2, 3))
@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bytes_are_rounded_once(wire: torch.dtype, dtype: torch.dtype) -> None:
    check_quantized_means(wire, dtype)


@run_on(threads=3)
@pytest.mark.parametrize("pieces", [[(70_001,), (300, 41)], [(1,)], [(5,), (2,)]], ids=str)
def test_bytes_in_long_rows_and_short_ones(pieces: Any) -> None:
    check_quantized_means(torch.int8, torch.float32, pieces)


@run_on(threads=(2, 3))
def test_wrappers() -> None:
    """16 bits around a hook: each number is rounded once more, before it."""
    for wrapper, bits in ((fp16_compress_wrapper, 11), (bf16_compress_wrapper, 8)):
        bucket = bucket_in_parts()
        every = of_every_rank(bucket)
        part = torch.stack([bucket.wanted_part(row) for row in every])
        seen = bucket.wanted_part(run(wrapper(allreduce_hook), None, bucket)).clone()
        # allreduce_hook divides in 16 bits too: two roundings of each quotient.
        assert_within(seen, part.mean(0), 2 * float_bound(part, bits, 2.0**-25))

        bucket = bucket_in_parts()
        seen = bucket.wanted_part(run(wrapper(quantization_pertensor_hook), None, bucket))
        bound = bucket.wanted_part(sent_bound(quantization_pertensor_hook, bucket, every, torch.int8))
        bound = bound * (1 + 2.0**-bits) + 2 * float_bound(part, bits, 2.0**-25)
        assert_within(seen, part.mean(0), bound)


@run_on(threads=3)
@QUANTIZING
def test_error_feedback_makes_the_sum_over_steps_right(hook: Any) -> None:
    """The same gradients in each step: what all steps add up to is off by the error of one."""
    num_steps, size = 12, dist.get_world_size()
    bucket = bucket_in_parts()
    every = of_every_rank(bucket)
    drifts: list[torch.Tensor] = []
    for error_feedback in (True, False):
        state = QuantizationState(error_feedback=error_feedback)
        total = torch.zeros(numel_of(PIECES), dtype=torch.float64)
        for _ in range(num_steps):
            bucket = bucket_in_parts()
            total += bucket.wanted_part(run(hook, state, bucket)).double()
        drifts.append((total - num_steps * bucket.wanted_part(every.mean(0))).abs())
    # Gradients with errors are larger by a part in 127 at most.
    once = bucket.wanted_part(sent_bound(hook, bucket, every, torch.int8)) * (1 + 1 / 127)
    roundings = bucket.wanted_part(every.abs().sum(0)) * 2.0**-22 * num_steps * size
    assert_within(drifts[0], torch.zeros(()), once + roundings)
    assert drifts[1].max() > 3 * drifts[0].max()


@QUANTIZING
@run_on(threads=2)
def test_an_infinite_step_is_seen_and_leaves_no_trace(hook: Any) -> None:
    state = QuantizationState(error_feedback=True)
    bucket = bucket_in_parts()
    bucket.buffer()[[3, bucket.buffer().numel() // 2 + 3]] = float("inf")
    assert not bucket.wanted_part(run(hook, state, bucket))[3].isfinite()
    assert state.errors[3].isfinite().all()
    bucket = bucket_in_parts()
    every = of_every_rank(bucket)
    seen, right = bucket.wanted_part(run(hook, state, bucket)), bucket.wanted_part(every.mean(0))
    bound = sent_bound(hook, bucket, every, torch.int8) * 2.02
    assert_within(seen, right, bucket.wanted_part(bound))


def test_chunks_are_the_parts() -> None:
    for part in (1, 15, 16, 17, 2389):
        starts = tuple(at * part for at in range(3))
        for plan in (
            plan_blocks(3 * part, 3, 512, starts, in_parts=True),
            plan_gradients(3 * part, 3, starts, in_parts=True),
        ):
            assert [(chunk.start, chunk.numel) for chunk in plan.chunks] == [(at, part) for at in starts]


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook, *QUANTIZING_HOOKS])
@run_on(threads=4)
def test_a_group_of_other_ranks_gets_the_whole_mean(hook: Any) -> None:
    """Of as many ranks as there are parts, and some at the very place of their part: all must do the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, other = mesh["shard"].get_group(), mesh["replicate"].get_group()
    bucket = bucket_in_parts(shard)
    every = of_every_rank(bucket)[dist.get_process_group_ranks(other)]
    with weft.record() as events:
        seen = run(hook, other, bucket)
    assert "reduce_scatter_tensor" not in ops(events)
    torch.testing.assert_close(seen.double(), every.mean(0), rtol=0, atol=1e-4)


@run_on(threads=2)
def test_a_bucket_that_is_not_in_parts_is_averaged_whole() -> None:
    for hook in (allreduce_hook, quantization_perchannel_hook):
        seen = run(hook, None, make_bucket())
        torch.testing.assert_close(seen.double(), every_rank().mean(0), rtol=0, atol=1e-4)


@run_on(threads=(2, 4))
def test_a_chains_stages_but_the_last_leave_the_whole_mean() -> None:
    """The same group twice: the second stage adds up what the first has made of other ranks' parts."""
    bucket = bucket_in_parts()
    every = of_every_rank(bucket)
    with weft.record() as events:
        seen = run(chain(allreduce_hook, quantization_perchannel_hook), None, bucket)
    assert ops(events) == ["all_reduce", "all_to_all_single"]
    means = every.mean(0).expand_as(every)
    bound = sent_bound(quantization_perchannel_hook, bucket, means, torch.int8)
    bound = bound + every.abs().sum(0) * 2**-22
    assert_within(bucket.wanted_part(seen), bucket.wanted_part(means[0]), bucket.wanted_part(bound))


# Traffic


def bytes_of(hook: Any, *wanted_ops: str) -> int:
    """That a rank gives in one step of a model whose gradients are some 480 kB, by these collectives."""
    model: Any = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 10, bias=False))
    fully_shard(model)
    model.register_comm_hook(None, hook)
    with weft.record() as events:
        model(torch.ones(2, 400)).sum().backward()
    assert ops(events) == list(wanted_ops)
    reducing = [event for event in events if event.op in wanted_ops]
    assert {event.feature for event in reducing} == {"fsdp"}
    return sum(event.bytes_in for event in reducing)


@run_on(threads=(2, 4))
def test_the_traffic_of_a_part() -> None:
    ranks = dist.get_world_size()
    numel = sum(-(-rows // ranks) * ranks * columns for rows, columns in ((300, 400), (300, 1), (10, 300)))
    plain = bytes_of(allreduce_hook, "reduce_scatter_tensor")
    assert plain == 4 * numel
    for hook in (fp16_compress_hook, bf16_compress_hook):
        assert bytes_of(hook, "reduce_scatter_tensor") == plain / 2
    sent = numel * (ranks - 1) // ranks  # a rank sends itself nothing
    # A byte a number; a scale for 512 of them, and for each piece that is shorter; messages end aligned.
    in_blocks = (numel // ranks // 512 + 3) * 4 + 2 * 16
    blocks = bytes_of(quantization_perchannel_hook, "all_to_all_single")
    assert sent < blocks <= sent + (ranks - 1) * in_blocks
    assert blocks <= 0.27 * (ranks - 1) / ranks * plain
    # Of the first weight one for 65536 numbers, of the others one each.
    in_rows = 4 * 4 + 2 * 16
    assert sent < bytes_of(quantization_pertensor_hook, "all_to_all_single") <= sent + (ranks - 1) * in_rows


@run_on(threads=2)
def test_half_of_what_a_whole_mean_takes() -> None:
    whole = chain(quantization_perchannel_hook, noop_hook)  # all but the last stage leave all of it
    part = bytes_of(quantization_perchannel_hook, "all_to_all_single")
    assert 2 * part == pytest.approx(bytes_of(whole, "all_to_all_single", "all_to_all_single"), rel=1e-3)
