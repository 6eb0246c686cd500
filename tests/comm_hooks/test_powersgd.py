"""PowerSGD: exact where the rank suffices, torch's numbers elsewhere, errors made good, states saved."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import (
    SHAPES,
    Shapes,
    assert_ranks_agree,
    every_rank,
    exact_mean,
    make_bucket,
    numbers,
    run,
)
from tests.ranks import run_on
from weft.comm_hooks import GradBucket
from weft.comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from weft.comm_hooks.low_rank import keep_directions, orthonormalize
from weft.comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from weft.testing import assert_calls

HOOK = pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
MATRICES: Shapes = [(40, 30), (9,), (25, 50), (40, 30), (3, 2, 5), ()]


def make_state(**options: Any) -> PowerSGDState:
    """PowerSGD after two plain steps, unless told otherwise."""
    return PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})


def warm_up(hook: Any, state: Any, shapes: Shapes = MATRICES, num_buckets: int = 1) -> None:
    while state.iter < state.start_powerSGD_iter:
        for index in range(num_buckets):
            bucket = make_bucket(shapes, index=index, is_last=index == num_buckets - 1, seed=index)
            torch.testing.assert_close(
                run(hook, state, bucket).double(), exact_mean(shapes, seed=index), rtol=0, atol=2e-9
            )


def low_rank_bucket(
    index: int = 0, rank: int = 1, *, is_last: bool = True
) -> tuple[GradBucket, torch.Tensor]:
    """A bucket of one matrix, whose mean has this rank; and the mean."""
    generator = torch.Generator().manual_seed(5 + index)
    left = torch.randn(40, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(30, rank, generator=generator, dtype=torch.float64)
    whole = (left @ right.t()).reshape(-1)
    mine = whole * (1 + dist.get_rank())
    mean = whole * (1 + dist.get_world_size()) / 2
    return GradBucket(index, mine.float(), [torch.empty(40, 30)], is_last=is_last), mean


@pytest.mark.parametrize(("start", "feedback", "warm"), list(product([0, 1], [True, False], [True, False])))
def test_what_is_remembered_begins_after_the_buckets_are_planned(
    start: int, feedback: bool, warm: bool
) -> None:
    options = {"start_powerSGD_iter": start, "use_error_feedback": feedback, "warm_start": warm}
    if not feedback and not warm:
        assert PowerSGDState(None, **options).start_powerSGD_iter == start
        return
    with pytest.raises(
        ValueError,
        match=r"Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
        r"because PowerSGD can only be applied after the first two iterations in DDP\.",
    ):
        PowerSGDState(process_group=None, matrix_approximation_rank=1, **options)


def test_a_rank_is_at_least_one() -> None:
    with pytest.raises(weft.ConfigError, match="matrix_approximation_rank must be at least 1; got 0"):
        PowerSGDState(None, matrix_approximation_rank=0)


@run_on(threads=2)
@HOOK
def test_plain_means_at_first(hook: Any) -> None:
    state = make_state()
    with weft.record() as events:
        warm_up(hook, state, num_buckets=2)
    assert_calls(events, ["all_reduce"] * 4)
    assert state.iter == 2
    assert state.compression_stats() == (0, 0, 0)


@run_on(threads=3)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_mean_of_that_rank_is_exact(rank: int) -> None:
    state = make_state(matrix_approximation_rank=rank)
    state.iter = 2
    bucket, mean = low_rank_bucket(rank=rank)
    with weft.record() as events:
        result = run(powerSGD_hook, state, bucket)
    torch.testing.assert_close(result.double(), mean, rtol=0, atol=float(mean.abs().max()) * 1e-5)
    assert_ranks_agree(result)
    assert [event.bytes_in for event in events] == [4 * 40 * rank, 4 * 30 * rank]


@run_on(threads=3)
@HOOK
@pytest.mark.parametrize(
    "shapes",
    [
        MATRICES,
        SHAPES,
        [(5,), (1,)],
        pytest.param([(7, 1)], marks=pytest.mark.full),
        pytest.param([(1, 9)], marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [False, True])
def test_ranks_end_with_the_same_bits(hook: Any, shapes: Shapes, batched: bool) -> None:
    state = make_state(matrix_approximation_rank=2, batch_tensors_with_same_shape=batched)
    warm_up(hook, state, shapes)
    for _ in range(3):
        result = run(hook, state, make_bucket(shapes))
        assert result.isfinite().all()
        assert_ranks_agree(result)


@run_on(threads=2)
def test_what_is_not_factored_is_the_plain_mean() -> None:
    state = make_state(matrix_approximation_rank=2, min_compression_rate=2)
    warm_up(powerSGD_hook, state)
    for seed in range(3):
        bucket = make_bucket(MATRICES, seed=seed)
        run(powerSGD_hook, state, bucket)
        right = GradBucket(0, exact_mean(MATRICES, seed=seed), bucket.parameters(), is_last=True).gradients()
        for place in (1, 4, 5):
            torch.testing.assert_close(bucket.gradients()[place].double(), right[place], rtol=0, atol=2e-9)
    before, after = 3 * (1200 * 2 + 1250 + 9 + 30 + 1), 3 * (2 * 70 * 2 + 75 * 2 + 40)
    assert state.compression_stats() == (before / after, before, after)


@run_on(threads=3)
@HOOK
def test_error_feedback_makes_the_sum_over_steps_right(hook: Any) -> None:
    """The same gradients in every step: with feedback the mean of the results becomes theirs."""
    apart: list[float] = []
    for feedback in (True, False):
        state = make_state(use_error_feedback=feedback)
        state.iter = 2
        results = [run(hook, state, make_bucket(MATRICES)).double() for _ in range(120)]
        apart.append(
            (
                (torch.stack(results).mean(0) - exact_mean(MATRICES)).norm() / exact_mean(MATRICES).norm()
            ).item()
        )
    assert apart[0] < 0.35
    assert apart[0] < apart[1] / 2


@run_on(threads=2)
@HOOK
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_keep_theirs(hook: Any, dtype: torch.dtype) -> None:
    state = make_state(matrix_approximation_rank=3)
    state.iter = 2
    for _ in range(2):
        result = run(hook, state, make_bucket(MATRICES, dtype=dtype))
        assert result.dtype == dtype
        assert result.isfinite().all()
        assert_ranks_agree(result)


@run_on(threads=2)
@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
def test_factors_in_16_bits(wrapper: Any) -> None:
    state = make_state()
    state.iter = 2
    bucket, mean = low_rank_bucket()
    with weft.record() as events:
        result = run(wrapper(powerSGD_hook), state, bucket)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), mean, rtol=0, atol=float(mean.abs().max()) * 0.03)
    assert [event.bytes_in for event in events] == [2 * 40, 2 * 30]


@run_on(threads=2)
@HOOK
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_step_of_zeros_is_zero_and_the_next_is_not(hook: Any, rank: int) -> None:
    """torch divides by the length of a column of zeros here, and every gradient is NaN from then on."""
    state = make_state(matrix_approximation_rank=rank, use_error_feedback=False)
    state.iter = 2
    zeros = GradBucket(0, torch.zeros(1200), [torch.empty(40, 30)], is_last=True)
    for _ in range(2):
        assert not run(hook, state, zeros).any()
    bucket, mean = low_rank_bucket()
    result = run(hook, state, bucket)
    assert result.isfinite().all()
    if hook is powerSGD_hook:
        torch.testing.assert_close(result.double(), mean, rtol=0, atol=float(mean.abs().max()) * 1e-4)
    else:
        assert result.any()


@run_on(threads=2)
@HOOK
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_shows_and_passes(hook: Any, bad: float) -> None:
    state = make_state()
    state.iter = 2
    bucket, _ = low_rank_bucket()
    bucket.buffer()[7] = bad
    assert not run(hook, state, bucket)[7].isfinite()
    for is_last in (False, True):
        bucket, mean = low_rank_bucket()
        result = run(hook, state, bucket)
        assert result.isfinite().all()
        if is_last and hook is powerSGD_hook:
            torch.testing.assert_close(result.double(), mean, rtol=0, atol=float(mean.abs().max()) * 0.02)


@run_on(threads=2)
@HOOK
def test_complex_and_sparse_buckets_travel_as_they_are(hook: Any) -> None:
    state = make_state()
    state.iter = 2
    rank = dist.get_rank()
    spiral = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1)
    result = run(hook, state, GradBucket(0, spiral, [spiral], is_last=False))
    torch.testing.assert_close(result, torch.tensor([1.5 + 3j, 4.5 - 1.5j], dtype=torch.complex64))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=True).coalesce()
    mean = run(hook, state, GradBucket(1, sparse, [torch.empty(4)], is_last=True))
    assert mean.to_dense().tolist() == [0.5, 0.5, 0.0, 0.0]


@run_on(threads=1)
@HOOK
def test_a_group_of_one_is_left_alone(hook: Any) -> None:
    state = make_state()
    for _ in range(4):
        bucket = make_bucket()
        before = bucket.buffer().clone()
        assert torch.equal(run(hook, state, bucket), before)
    assert state.iter == 4


def train(hook: Any, state: PowerSGDState, weights: list[torch.Tensor], seeds: range) -> list[torch.Tensor]:
    """Plain SGD on a model of two buckets, whose gradients depend on the weights."""
    for seed in seeds:
        futures = []
        for index, weight in enumerate(weights):
            noise = numbers(dist.get_rank(), weight.numel(), seed=seed)
            gradient = noise + 0.1 * weight
            bucket = GradBucket(index, gradient, [torch.empty(40, 30)], is_last=index == len(weights) - 1)
            futures.append(hook(state, bucket))
        for weight, future in zip(weights, futures, strict=True):
            weight.sub_(future.wait(), alpha=0.5)
    return weights


def first_weights() -> list[torch.Tensor]:
    return [numbers(9, 1200, seed=index) for index in range(2)]


def save_and_load(state: PowerSGDState, way: str, options: dict[str, Any]) -> PowerSGDState:
    if way == "pickle":
        return pickle.loads(pickle.dumps(state))
    if way == "torch.save":
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        loaded = make_state(**options)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        return loaded
    loaded = make_state(**options)
    loaded.load_state_dict(copy.deepcopy(state.state_dict()))
    return loaded


@run_on(threads=2)
@HOOK
@pytest.mark.parametrize("way", ["pickle", "torch.save", pytest.param("state_dict", marks=pytest.mark.full)])
@pytest.mark.parametrize("warm_start", [True, pytest.param(False, marks=pytest.mark.full)])
def test_training_goes_on_from_a_saved_state_as_if_nothing_had_happened(
    hook: Any, way: str, warm_start: bool
) -> None:
    options = {"warm_start": warm_start, "random_seed": 11}
    unbroken = make_state(**options)
    right = train(hook, unbroken, first_weights(), range(8))

    halfway = make_state(**options)
    weights = train(hook, halfway, first_weights(), range(5))
    resumed = save_and_load(halfway, way, options)
    seen = train(hook, resumed, [weight.clone() for weight in weights], range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(seen, right, strict=True))

    forgetful = make_state(**options)
    forgetful.iter = halfway.iter
    lost = train(hook, forgetful, [weight.clone() for weight in weights], range(5, 8))
    assert not all(torch.equal(a, b) for a, b in zip(lost, right, strict=True))


@run_on(threads=2)
def test_a_pickle_is_without_its_group_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    group = dist.new_group([0, 1])
    state = PowerSGDState(group, start_powerSGD_iter=4)
    with caplog.at_level(logging.WARNING):
        loaded = pickle.loads(pickle.dumps(state))
    assert "a process group can't be saved" in caplog.text
    assert "uses the default process group" in caplog.text
    assert loaded.process_group is dist.group.WORLD
    assert loaded.__slots__ == state.__slots__
    for name in state.__slots__:
        if name not in ("process_group", "rng"):
            assert getattr(loaded, name) == getattr(state, name), name


def test_a_pickle_is_loaded_where_there_is_no_group() -> None:
    loaded = pickle.loads(pickle.dumps(PowerSGDState(None)))
    assert loaded.process_group is None


@run_on(threads=2)
def test_a_rank_that_gives_other_numbers_changes_the_mean() -> None:
    """The bounds above are no formality: each rank's gradients count."""
    state = make_state()
    state.iter = 2
    bucket, mean = low_rank_bucket()
    if dist.get_rank() == 1:
        bucket.buffer().mul_(1.01)
    result = run(powerSGD_hook, state, bucket)
    assert not torch.allclose(result.double(), mean, rtol=0, atol=float(mean.abs().max()) * 1e-3)
    assert every_rank().shape[0] == 2


# Orthonormal columns, for matrices of every kind; directions that must not be lost


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_columns_become_orthonormal_and_span_the_same(
    rank: int, dtype: torch.dtype, tolerance: float
) -> None:
    matrices = draw(3, 20, rank, dtype=dtype)
    before = matrices.clone()
    orthonormalize(matrices)
    products = matrices.transpose(1, 2) @ matrices
    torch.testing.assert_close(
        products, torch.eye(rank, dtype=dtype).expand(3, rank, rank), rtol=0, atol=tolerance
    )
    # Projected on the columns nothing of the old ones is lost.
    projected = matrices @ (matrices.transpose(1, 2) @ before)
    torch.testing.assert_close(projected, before, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_16_bit_matrices_do_not_overflow(dtype: torch.dtype, rank: int) -> None:
    matrices = draw(1, 30, rank).mul(1000).to(dtype)  # squares of these are past float16
    orthonormalize(matrices)
    products = (matrices.transpose(1, 2) @ matrices).float()
    torch.testing.assert_close(products, torch.eye(rank).unsqueeze(0), rtol=0, atol=0.05)


@pytest.mark.parametrize("rank", [2, 4])
def test_columns_that_depend_on_each_other_become_orthonormal(rank: int) -> None:
    """A gradient of rank 1, as of a batch of one row: its P has parallel columns."""
    matrices = draw(2, 40, 1) @ draw(2, 1, rank)
    orthonormalize(matrices)
    products = matrices.transpose(1, 2) @ matrices
    torch.testing.assert_close(products, torch.eye(rank).expand(2, rank, rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_matrix_of_zeros_stays_one(rank: int) -> None:
    matrices = torch.zeros(1, 6, rank)
    orthonormalize(matrices)
    assert not matrices.any()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_column_without_direction_keeps_the_old_one(bad: float) -> None:
    new, old = draw(1, 5, 2), draw(1, 5, 2) + 1
    new[0, :, 1] = bad
    kept = keep_directions(new, old)
    assert torch.equal(kept[0, :, 0], new[0, :, 0])
    assert torch.equal(kept[0, :, 1], old[0, :, 1])
