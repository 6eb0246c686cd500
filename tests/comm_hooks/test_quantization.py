"""The quantizing hooks: close to the exact mean, the same bits on every rank, few bytes, nothing hidden."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import (
    SHAPES,
    Shapes,
    assert_ranks_agree,
    assert_within,
    every_rank,
    exact_mean,
    make_bucket,
    run,
)
from tests.ranks import run_on
from weft.comm_hooks import GradBucket
from weft.comm_hooks.default_hooks import fp16_compress_wrapper
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients
from weft.testing import assert_calls, bytes_by_op

HOOKS = [quantization_pertensor_hook, quantization_perchannel_hook]
HOOK = pytest.mark.parametrize("hook", HOOKS)
LARGE: Shapes = [(700, 300), (300,), (30_001,)]


def plan_of(hook: Any, bucket: GradBucket) -> QuantizePlan:
    numel, size = bucket.buffer().numel(), dist.get_world_size()
    if hook is quantization_perchannel_hook:
        return plan_blocks(numel, size, 512, bucket.starts())
    return plan_gradients(numel, size, bucket.starts(), is_cpu=True)


def row_maxima(values: torch.Tensor, plan: QuantizePlan) -> torch.Tensor:
    """Each number's row's largest absolute value."""
    maxima = torch.zeros_like(values)
    for chunk in plan.chunks:
        for run_ in chunk.runs:
            start = chunk.start + run_.start
            rows = values[start : start + run_.numel].view(run_.num_rows, run_.row_numel)
            maxima[start : start + run_.numel] = rows.abs().amax(1, keepdim=True).expand_as(rows).reshape(-1)
    return maxima


def int8_bound(per_rank: torch.Tensor, plan: QuantizePlan) -> torch.Tensor:
    """Half a scale of each sender's row, the adder left out, and half a scale of the mean's."""
    size = len(per_rank)
    owner = torch.cat([torch.full((chunk.numel,), rank) for rank, chunk in enumerate(plan.chunks)])
    sent = torch.stack([row_maxima(values, plan) * (owner != rank) for rank, values in enumerate(per_rank)])
    sent_error = sent.sum(0) / size * 0.5 / 127
    mean_error = (row_maxima(per_rank.mean(0), plan) + sent_error) * 0.5 / 127
    largest = torch.stack([row_maxima(values, plan) for values in per_rank]).sum(0)
    return sent_error + mean_error * 1.01 + largest * 2**-21


@run_on(threads=3)
@run_on(threads=(2, 4), full=True)
@HOOK
@pytest.mark.parametrize("shapes", [SHAPES, LARGE, [(1,)], [(5,)], [(3, 1), (2,)]], ids=str)
def test_the_mean_within_half_scales(hook: Any, shapes: Shapes) -> None:
    bucket = make_bucket(shapes)
    bound = int8_bound(every_rank(shapes), plan_of(hook, bucket))
    result = run(hook, None, bucket)
    assert_within(result, exact_mean(shapes), bound)
    assert_ranks_agree(result)
    assert result.data_ptr() == bucket.buffer().data_ptr()


@run_on(threads=2)
@HOOK
def test_the_seeds_tolerance_holds(hook: Any) -> None:
    """40 x 20 gradients x^(1 + rank) / 800 of normal x."""
    x = torch.randn(40, 20, generator=torch.Generator().manual_seed(2020))
    flats = [(x ** (1 + rank) / 800).reshape(-1) for rank in range(2)]
    bucket = GradBucket(0, flats[dist.get_rank()].clone(), [x], is_last=True)
    result = run(hook, None, bucket)
    torch.testing.assert_close(result, (flats[0] + flats[1]) / 2, rtol=1e-5, atol=1e-4)


@run_on(threads=(2, 4))
@HOOK
def test_a_quarter_of_the_bytes_in_two_collectives(hook: Any) -> None:
    bucket = make_bucket(LARGE)
    plain_bytes = bucket.buffer().numel() * 4
    with weft.record() as events:
        run(hook, None, bucket)
    second = "all_to_all_single" if dist.get_world_size() == 2 else "all_gather_into_tensor"
    assert_calls(events, ["all_to_all_single", second])
    assert sum(bytes_by_op(events).values()) <= 0.27 * plain_bytes
    assert {event.feature for event in events} == {"ddp"}


@run_on(threads=3)
@HOOK
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_keep_theirs(hook: Any, dtype: torch.dtype) -> None:
    bucket = make_bucket(dtype=dtype)
    bound = int8_bound(every_rank(dtype=dtype), plan_of(hook, bucket))
    result = run(hook, None, bucket)
    assert result.dtype == dtype
    right = exact_mean(dtype=dtype)
    assert_within(result, right, bound + (right.abs() + bound) * torch.finfo(dtype).eps)
    assert_ranks_agree(result)


@run_on(threads=3)
@HOOK
def test_fp8_keeps_three_bits(hook: Any) -> None:
    state = QuantizationState(dtype=torch.float8_e4m3fn)
    result = run(hook, state, make_bucket())
    # A sixteenth of each rank's number, and of the sum; below a scale's 2^-9 all numbers are as good as zero.
    bound = every_rank().abs().mean(0) * 2 * (2**-4 + 2**-9) + every_rank().abs().max() / 448 * 2**-8
    assert_within(result, exact_mean(), bound)
    assert_ranks_agree(result)


@run_on(threads=3)
@HOOK
def test_zeros_stay_zero(hook: Any) -> None:
    result = run(hook, None, GradBucket(0, torch.zeros(3000), [torch.empty(3000)], is_last=True))
    assert not result.any()


@run_on(threads=3)
@HOOK
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [5, 2900])
def test_what_is_not_finite_arrives_so(hook: Any, bad: float, at: int) -> None:
    shapes = [(100,), (2000,), (900,)]
    bucket = make_bucket(shapes)
    if dist.get_rank() == 1:
        bucket.buffer()[at] = bad
    result = run(hook, None, bucket)
    assert not result[at].isfinite()
    # Gradients of other rows are as they should be.
    fine = result[1100:1200]
    assert fine.isfinite().all()
    torch.testing.assert_close(fine.double(), exact_mean(shapes)[1100:1200], rtol=0, atol=1e-4)
    assert_ranks_agree(result)


@run_on(threads=1)
@HOOK
def test_a_group_of_one_is_left_alone(hook: Any) -> None:
    bucket = make_bucket()
    before = bucket.buffer().clone()
    with weft.record() as events:
        assert torch.equal(run(hook, QuantizationState(error_feedback=True), bucket), before)
    assert events == []


@run_on(threads=2)
@HOOK
def test_complex_and_sparse_buckets_travel_as_they_are(hook: Any) -> None:
    rank = dist.get_rank()
    numbers = torch.tensor([1e-9 + 2j, 3.0 - 1e9j], dtype=torch.complex64) * (rank + 1)
    result = run(hook, None, GradBucket(0, numbers, [numbers], is_last=False))
    torch.testing.assert_close(
        result, torch.tensor([1e-9 + 2j, 3.0 - 1e9j], dtype=torch.complex64) * 1.5, rtol=1e-6, atol=0
    )
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=True).coalesce()
    mean = run(hook, None, GradBucket(1, sparse, [torch.empty(4)], is_last=True))
    assert mean.to_dense().tolist() == [0.5, 0.5, 0.0, 0.0]


@run_on(threads=4)
@HOOK
def test_a_group_may_be_given(hook: Any) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which = dist.get_rank() % 2
    right = every_rank()[which::2].mean(0)
    for state in (pairs[which], QuantizationState(pairs[which])):
        torch.testing.assert_close(run(hook, state, make_bucket()).double(), right, rtol=0, atol=1e-4)


@run_on(threads=2)
def test_the_block_size_is_the_hooks_or_the_states() -> None:
    bucket = make_bucket(LARGE)
    with weft.record() as events:
        run(quantization_perchannel_hook, None, bucket)
        quantization_perchannel_hook(None, bucket, 64).wait()
        run(quantization_perchannel_hook, QuantizationState(block_size=64), bucket)
    sizes = [event.bytes_in for event in events.by_op("all_to_all_single")][::2]
    assert sizes[0] < sizes[1] == sizes[2]


@run_on(threads=3)
@HOOK
def test_error_feedback_makes_the_sum_over_steps_right(hook: Any) -> None:
    """The error of all steps together is that of one: without feedback it grows with each."""
    num_steps, size = 40, dist.get_world_size()
    drifts: list[float] = []
    for error_feedback in (True, False):
        state = QuantizationState(error_feedback=error_feedback)
        total = torch.zeros(sum(torch.empty(shape).numel() for shape in SHAPES), dtype=torch.float64)
        for _ in range(num_steps):
            total += run(hook, state, make_bucket()).double()
        drifts.append((total - num_steps * exact_mean()).abs().max().item())
    largest = every_rank().abs().max().item()
    # What is left is in the ranks' errors, each at most half a scale of gradients with errors.
    assert drifts[0] <= 2 * (size - 1) / size * largest * 1.02 / 127
    assert drifts[1] > 3 * drifts[0]


@run_on(threads=2)
@HOOK
def test_an_infinite_step_leaves_no_trace_in_the_errors(hook: Any) -> None:
    state = QuantizationState(error_feedback=True)
    bucket = make_bucket()
    bucket.buffer()[3] = float("inf")
    assert not run(hook, state, bucket)[3].isfinite()
    result = run(hook, state, make_bucket())
    assert result.isfinite().all()
    torch.testing.assert_close(result.double(), exact_mean(), rtol=0, atol=3e-4)


def steps(state: QuantizationState, seeds: range) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for seed in seeds:
        for index in range(2):
            bucket = make_bucket(index=index, is_last=index == 1, seed=seed)
            results.append(run(quantization_perchannel_hook, state, bucket).clone())
    return results


@run_on(threads=2)
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_going_on_from_a_saved_state_is_as_if_nothing_had_happened(way: str, caplog: Any) -> None:
    unbroken = QuantizationState(error_feedback=True)
    steps(unbroken, range(3))
    if way == "pickle":
        resumed = pickle.loads(pickle.dumps(unbroken))
    else:
        resumed = QuantizationState(error_feedback=True)
        resumed.load_state_dict(copy.deepcopy(unbroken.state_dict()))
    fresh = QuantizationState(error_feedback=True)
    right, seen, other = (steps(state, range(3, 6)) for state in (unbroken, resumed, fresh))
    assert all(torch.equal(a, b) for a, b in zip(right, seen, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(right, other, strict=True))


@run_on(threads=2)
def test_buckets_that_were_planned_anew_start_without_errors() -> None:
    state = QuantizationState(error_feedback=True)
    run(quantization_pertensor_hook, state, make_bucket(LARGE))
    result = run(quantization_pertensor_hook, state, make_bucket())
    torch.testing.assert_close(result.double(), exact_mean(), rtol=0, atol=1e-4)


@run_on(threads=2)
def test_16_bits_around_int8() -> None:
    result = run(fp16_compress_wrapper(quantization_perchannel_hook), None, make_bucket())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact_mean(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{"dtype": torch.int16}, {"dtype": torch.uint8}, {"block_size": 0}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(weft.ConfigError, match="QuantizationState: "):
        QuantizationState(**options)
