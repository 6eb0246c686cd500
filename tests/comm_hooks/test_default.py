"""The plain hooks: right means in every dtype, and nothing destroyed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import (
    assert_ranks_agree,
    assert_within,
    every_rank,
    exact_mean,
    make_bucket,
    run,
)
from tests.ranks import run_on
from weft.comm_hooks import DDPCommHookType, GradBucket, debugging_hooks, register_ddp_comm_hook
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from weft.comm_hooks.narrowing import narrow_quotients, widen
from weft.testing import Expect, assert_calls

COMPRESSING = [
    pytest.param(fp16_compress_hook, torch.float16, id="fp16"),
    pytest.param(bf16_compress_hook, torch.bfloat16, id="bf16"),
    pytest.param(fp16_compress_wrapper(allreduce_hook), torch.float16, id="fp16_wrapper"),
    pytest.param(
        bf16_compress_wrapper(allreduce_hook), torch.bfloat16, id="bf16_wrapper", marks=pytest.mark.full
    ),
]
ALL_HOOKS = [
    pytest.param(allreduce_hook, id="allreduce"),
    *(pytest.param(param.values[0], id=param.id, marks=param.marks) for param in COMPRESSING),
]
BITS_16 = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-9, 2.0**-134)}


def rounding_bound(narrow: torch.dtype) -> torch.Tensor:
    """Each rank's number is rounded once, divided at most once more, and each sum is rounded."""
    relative, least = BITS_16[narrow]
    size = dist.get_world_size()
    return every_rank().abs().sum(0) / size * relative * (size + 2) + least * 2 * size


@run_on(threads=3)
def test_allreduce_is_the_mean_in_place() -> None:
    bucket = make_bucket()
    result = run(allreduce_hook, None, bucket)
    assert result.data_ptr() == bucket.buffer().data_ptr()
    torch.testing.assert_close(result.double(), exact_mean(), rtol=0, atol=2e-9)


@run_on(threads=3)
@pytest.mark.parametrize(("hook", "narrow"), COMPRESSING)
def test_16_bits_are_the_mean_to_their_precision(hook: Any, narrow: torch.dtype) -> None:
    with weft.record() as events:
        bucket = make_bucket()
        result = run(hook, None, bucket)
    assert result.dtype == torch.float32
    assert result.data_ptr() == bucket.buffer().data_ptr()
    assert_within(result, exact_mean(), rounding_bound(narrow))
    assert_ranks_agree(result)
    assert_calls(events, [Expect("all_reduce", feature="ddp", dtype=narrow)])


@run_on(threads=2)
@pytest.mark.parametrize(("hook", "narrow"), COMPRESSING)
def test_float64_comes_back_as_float64(hook: Any, narrow: torch.dtype) -> None:
    result = run(hook, None, make_bucket(dtype=torch.float64))
    assert result.dtype == torch.float64
    assert_within(result, exact_mean(dtype=torch.float64), rounding_bound(narrow))


@run_on(threads=2)
@pytest.mark.parametrize("hook", ALL_HOOKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_travel_as_they_are(hook: Any, dtype: torch.dtype) -> None:
    with weft.record() as events:
        result = run(hook, None, make_bucket(dtype=dtype))
    assert result.dtype == dtype
    assert_calls(events, [Expect("all_reduce", dtype=dtype)])
    halves = every_rank(dtype=dtype).to(dtype).div(2)
    assert torch.equal(result, halves[0] + halves[1])


@run_on(threads=3)
@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_complex_gradients_are_not_destroyed(hook: Any) -> None:
    rank = dist.get_rank()
    buffer = torch.tensor([1e-9 + 2j, 3.0 - 1e9j], dtype=torch.complex64) * (rank + 1)
    result = run(hook, None, GradBucket(0, buffer, [buffer], is_last=True))
    right = torch.tensor([1e-9 + 2j, 3.0 - 1e9j], dtype=torch.complex64) * 2
    torch.testing.assert_close(result, right, rtol=1e-6, atol=0)


@run_on(threads=3)
@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_integers_are_averaged_as_integers(hook: Any) -> None:
    buffer = torch.tensor([3, 2**40, -3]) * (dist.get_rank() + 1)
    result = run(hook, None, GradBucket(0, buffer, [buffer], is_last=True))
    assert result.tolist() == [6, 2**41, -6]


@run_on(threads=3)
@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_sparse_gradients_are_averaged_as_they_are(hook: Any) -> None:
    rank = dist.get_rank()
    sparse = torch.sparse_coo_tensor(
        [[rank, 5]], torch.full((2, 2), rank + 1e-9), (8, 2), check_invariants=True
    ).coalesce()
    result = run(hook, None, GradBucket(0, sparse, [torch.empty(8, 2)], is_last=True))
    right = torch.zeros(8, 2)
    for other in range(3):
        right[other] += (other + 1e-9) / 3
        right[5] += (other + 1e-9) / 3
    assert result.layout == torch.sparse_coo
    torch.testing.assert_close(result.to_dense(), right)


@run_on(threads=2)
def test_a_mean_fits_where_a_number_does_not() -> None:
    """70000 is past float16, its half is not."""
    values = torch.full((4,), 70_000.0 if dist.get_rank() == 0 else -10_000.0)
    result = run(fp16_compress_hook, None, GradBucket(0, values, [torch.empty(4)], is_last=True))
    torch.testing.assert_close(result, torch.full((4,), 30_000.0), rtol=1e-3, atol=0)


@run_on(threads=1)
@pytest.mark.parametrize("hook", ALL_HOOKS[:3])
def test_a_group_of_one_is_left_alone(hook: Any) -> None:
    with weft.record() as events:
        bucket = make_bucket()
        before = bucket.buffer().clone()
        assert torch.equal(run(hook, None, bucket), before)
    assert events == []


@run_on(threads=4)
@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_a_group_may_be_given(hook: Any) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    result = run(hook, group, make_bucket())
    right = every_rank()[dist.get_rank() % 2 :: 2].mean(0)
    assert_within(result, right, rounding_bound(torch.bfloat16))


@run_on(threads=2)
def test_noop_keeps_each_ranks_own() -> None:
    with weft.record() as events:
        bucket = make_bucket()
        result = run(debugging_hooks.noop_hook, None, bucket)
    assert torch.equal(result.double(), every_rank()[dist.get_rank()])
    assert events == []


@run_on(threads=2)
def test_a_wrapper_leaves_the_bucket_it_was_given() -> None:
    seen: list[torch.dtype] = []

    def noting_hook(state: Any, bucket: GradBucket) -> Any:
        seen.extend(gradient.dtype for gradient in bucket.gradients())
        return allreduce_hook(state, bucket)

    bucket = make_bucket()
    run(fp16_compress_wrapper(noting_hook), None, bucket)
    assert set(seen) == {torch.float16}
    assert bucket.buffer().dtype == torch.float32


class Model:
    """Stands for a data-parallel model: notes what is registered."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.registered = (state, hook.__name__)


@pytest.mark.parametrize(
    ("kind", "name", "rank"),
    [
        ("ALLREDUCE", "allreduce_hook", None),
        ("FP16_COMPRESS", "fp16_compress_hook", None),
        ("BF16_COMPRESS", "bf16_compress_hook", None),
        ("QUANTIZE_PER_TENSOR", "quantization_pertensor_hook", None),
        ("QUANTIZE_PER_CHANNEL", "quantization_perchannel_hook", None),
        ("POWER_SGD", "powerSGD_hook", 1),
        ("POWER_SGD_RANK2", "powerSGD_hook", 2),
        ("BATCHED_POWER_SGD", "batched_powerSGD_hook", 1),
        ("BATCHED_POWER_SGD_RANK2", "batched_powerSGD_hook", 2),
        ("NOOP", "noop_hook", None),
    ],
)
def test_hooks_have_names(kind: str, name: str, rank: int | None) -> None:
    model = Model()
    register_ddp_comm_hook(DDPCommHookType[kind], model, "a group")
    state, registered = model.registered
    assert registered == name
    assert (state if rank is None else state.process_group) == "a group"
    assert rank is None or state.matrix_approximation_rank == rank
    assert [member.name for member in DDPCommHookType].count(kind) == 1


def test_a_hook_is_no_name() -> None:
    with pytest.raises(
        weft.ConfigError, match=r"must be a weft.comm_hooks.DDPCommHookType; got <function allreduce"
    ):
        register_ddp_comm_hook(allreduce_hook, Model())  # type: ignore[arg-type]


# A bucket in 16 bits within its own memory: nothing is overwritten before it is read


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
