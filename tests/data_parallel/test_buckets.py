"""The bucket plan: who goes where, in which order; and a bucket's buffer as it is filled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data_parallel import flat_gradients
from weft.data_parallel.bucket_plan import (
    MB,
    BucketCaps,
    BucketPlan,
    ParamSpec,
    param_spec,
    plan_buckets,
    resolve_caps,
)
from weft.data_parallel.flat_gradients import FlatGradients
from weft.data_parallel.parameters import make_ddp_param
from weft.errors import ConfigError

CPU = torch.device("cpu")


def spec(numel: int, dtype: torch.dtype = torch.float32, **flags: bool) -> ParamSpec:
    return ParamSpec(f"p{numel}", (numel,), (1,), dtype, CPU, **flags)


def caps(first: int, rest: int | None = None) -> BucketCaps:
    return BucketCaps(first, first if rest is None else rest)


def members(plan: tuple[BucketPlan, ...]) -> list[tuple[int, ...]]:
    return [bucket.params for bucket in plan]


def test_parameters_fill_buckets_in_the_order_given() -> None:
    plan = plan_buckets([spec(10)] * 4, [3, 2, 1, 0], caps(80))
    assert members(plan) == [(3, 2), (1, 0)]
    assert [bucket.offsets for bucket in plan] == [(0, 10), (0, 10)]
    assert [bucket.numel for bucket in plan] == [20, 20]


def test_a_bucket_is_closed_before_it_would_exceed_its_cap() -> None:
    plan = plan_buckets([spec(9), spec(9), spec(9), spec(9)], [0, 1, 2, 3], caps(80))
    assert members(plan) == [(0, 1), (2, 3)]


def test_a_large_parameter_does_not_wait_for_small_ones() -> None:
    plan = plan_buckets([spec(1), spec(11), spec(1), spec(11)], [0, 1, 2, 3], caps(80))
    assert members(plan) == [(0, 1), (2, 3)]


def test_a_bucket_that_is_not_half_full_takes_the_one_that_is_too_large() -> None:
    plan = plan_buckets([spec(2), spec(100), spec(2)], [0, 1, 2], caps(80))
    assert members(plan) == [(0, 1), (2,)]


def test_the_first_bucket_has_a_cap_of_its_own() -> None:
    plan = plan_buckets([spec(10)] * 5, list(range(5)), caps(40, 80))
    assert members(plan) == [(0,), (1, 2), (3, 4)]


def test_each_bucket_may_have_its_cap() -> None:
    plan = plan_buckets([spec(10)] * 6, list(range(6)), BucketCaps(1, 40, (80, 120)))
    assert members(plan) == [(0, 1), (2, 3, 4), (5,)]


def test_dtypes_fill_side_by_side_and_go_when_they_are_full() -> None:
    half = torch.float16
    plan = plan_buckets([spec(10), spec(10, half), spec(10), spec(10, half)], [0, 1, 2, 3], caps(80))
    assert members(plan) == [(0, 2), (1, 3)]
    assert [bucket.dtype for bucket in plan] == [torch.float32, half]


def test_sparse_gradients_travel_alone() -> None:
    plan = plan_buckets([spec(5), spec(5, is_sparse=True), spec(5)], [0, 1, 2], caps(800))
    assert members(plan) == [(1,), (0, 2)]
    assert [bucket.is_sparse for bucket in plan] == [True, False]


def test_delayed_parameters_go_last_whenever_they_come() -> None:
    plan = plan_buckets([spec(5, is_delayed=True), spec(5), spec(5)], [0, 1, 2], caps(20))
    assert members(plan) == [(1,), (2,), (0,)]


def test_an_order_must_name_each_parameter_once() -> None:
    with pytest.raises(ConfigError, match="each of the 2 parameters once"):
        plan_buckets([spec(1)] * 2, [0, 0], caps(8))


@pytest.mark.parametrize("cap", [-1, "big", True, [1]])
def test_caps_are_numbers_of_megabytes(cap: object) -> None:
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        resolve_caps(cap, None)  # type: ignore[arg-type]


def test_caps_are_torchs() -> None:
    assert resolve_caps(None, None) == BucketCaps(MB, 25 * MB)
    assert resolve_caps(2, None) == BucketCaps(2 * MB, 2 * MB)
    assert [resolve_caps(None, [1, 3]).of(bucket) for bucket in range(4)] == [MB, 3 * MB, 25 * MB, 25 * MB]


def test_a_gradient_lies_as_its_parameter_does() -> None:
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert param_spec("w", image).strides == image.stride()
    assert param_spec("w", torch.empty(4, 6).t()).strides == (1, 6)
    assert param_spec("w", torch.empty(4, 6)[:, ::2]).strides == (3, 1)  # has gaps, its gradient none
    assert param_spec("w", torch.empty(1).expand(4)).strides == (1,)
    assert param_spec("w", torch.empty(())).strides == ()


SPECS = st.lists(
    st.builds(
        spec,
        st.integers(0, 50),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        is_sparse=st.booleans(),
        is_delayed=st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(SPECS, st.randoms(use_true_random=False), st.integers(0, 400), st.integers(0, 400))
def test_any_plan_keeps_its_promises(specs: list[ParamSpec], chance: object, first: int, rest: int) -> None:
    order = list(range(len(specs)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    plan = plan_buckets(specs, order, caps(first, rest))
    assert sorted(itertools.chain.from_iterable(members(plan))) == list(range(len(specs)))
    place = {index: (specs[index].is_delayed, at) for at, index in enumerate(order)}
    ends = [max(place[index] for index in bucket.params) for bucket in plan]
    assert ends == sorted(ends)  # the order in which they fill
    for bucket in plan:
        inside = [specs[index] for index in bucket.params]
        assert {(one.dtype, one.device) for one in inside} == {(bucket.dtype, bucket.device)}
        assert bucket.is_sparse == inside[0].is_sparse
        assert not bucket.is_sparse or len(inside) == 1
        sizes = [one.numel for one in inside]
        assert list(bucket.offsets) == list(itertools.accumulate([0, *sizes[:-1]]))
        assert bucket.numel == sum(sizes)
    assert plan == plan_buckets(specs, order, caps(first, rest))


SHAPES = [(130, 130), (3,), (2, 3), (140, 120)]  # the first and the last are large
EMPTY = torch.empty(0)


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> FlatGradients:
    def allocate(shape: Any, dtype: Any, device: Any, group: Any) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(flat_gradients.comm, "allocate", allocate)
    params = [torch.zeros(shape) for shape in SHAPES]
    ddp_params = [
        make_ddp_param(f"p{at}", param, is_sparse=False, is_delayed=False) for at, param in enumerate(params)
    ]
    (plan,) = plan_buckets([one.spec for one in ddp_params], range(len(params)), resolve_caps(100, None))
    return FlatGradients(plan, ddp_params, None)  # type: ignore[arg-type]


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
        place, factor = buffer.destination(at, scale)
        torch.mul(grads[at], factor, out=place)
    told = [EMPTY if at in placed else grad for at, grad in enumerate(grads)]
    buffer.fill(told, scale, placed)
    for view, grad in zip(buffer.views, grads, strict=True):
        assert torch.equal(view, grad * scale)
