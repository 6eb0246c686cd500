"""chain: stages in sequence, wrappers around what is behind them, one state to save."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import SHAPES, every_rank, exact_mean, make_bucket, run
from tests.ranks import run_on
from weft.comm_hooks import GradBucket, chain
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from weft.comm_hooks.in_order import completed
from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from weft.testing import Expect, assert_calls


def halve_hook(state: Any, bucket: GradBucket) -> Any:
    """Half of what it gets, in memory of its own."""
    half = bucket.buffer() / 2
    return completed(half, half)


def grid() -> tuple[Any, Any]:
    """Four ranks as two hosts of two: my host's group and the one across hosts."""
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return hosts[dist.get_rank() // 2], across[dist.get_rank() % 2]


@run_on(threads=4)
def test_near_ranks_first_then_far_ones_in_16_bits() -> None:
    host, across = grid()
    hook = chain((host, allreduce_hook), (across, fp16_compress_hook))
    with weft.record() as events:
        futures = [hook(None, make_bucket(index=seed, is_last=seed == 3, seed=seed)) for seed in range(4)]
        results = [future.wait() for future in futures]
    for seed, result in enumerate(results):
        torch.testing.assert_close(result.double(), exact_mean(seed=seed), rtol=0, atol=4e-6)
    pair = [Expect("all_reduce", dtype=torch.float32), Expect("all_reduce", dtype=torch.float16)]
    assert_calls(events, pair * 4)


@run_on(threads=4)
def test_near_ranks_first_then_far_ones_in_bytes() -> None:
    host, across = grid()
    hook = chain((host, allreduce_hook), (QuantizationState(across), quantization_perchannel_hook))
    futures = [hook(None, make_bucket(index=seed, is_last=seed == 3, seed=seed)) for seed in range(4)]
    for seed, future in enumerate(futures):
        torch.testing.assert_close(future.wait().double(), exact_mean(seed=seed), rtol=0, atol=1e-4)


@run_on(threads=2)
def test_a_stage_gets_what_the_one_before_made() -> None:
    result = run(chain(halve_hook, allreduce_hook, halve_hook), None, make_bucket())
    torch.testing.assert_close(result.double(), exact_mean() / 4, rtol=0, atol=2e-9)


@run_on(threads=2)
def test_one_stage_is_that_hook() -> None:
    assert torch.equal(
        run(chain(allreduce_hook), None, make_bucket()), run(allreduce_hook, None, make_bucket())
    )


@run_on(threads=2)
def test_a_wrapper_goes_around_what_is_behind_it() -> None:
    seen: list[torch.dtype] = []

    def noting_hook(state: Any, bucket: GradBucket) -> Any:
        seen.append(bucket.buffer().dtype)
        return completed(bucket.buffer(), bucket.buffer())

    hook = chain(noting_hook, fp16_compress_wrapper, noting_hook, allreduce_hook, noting_hook)
    result = run(hook, None, make_bucket())
    assert seen == [torch.float32, torch.float16, torch.float16]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact_mean(), rtol=0, atol=4e-6)


@run_on(threads=2)
def test_a_wrapped_chain_is_the_wrapped_hook() -> None:
    states = [PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1) for _ in range(2)]
    chained = chain(bf16_compress_wrapper, (states[0], powerSGD_hook))
    wrapped = bf16_compress_wrapper(powerSGD_hook)
    for seed in range(4):
        seen = run(chained, None, make_bucket([(40, 30)], seed=seed))
        right = run(wrapped, states[1], make_bucket([(40, 30)], seed=seed))
        assert torch.equal(seen, right)


@run_on(threads=2)
def test_a_chain_in_a_chain() -> None:
    inner = chain(halve_hook, allreduce_hook)
    result = run(chain(inner, halve_hook), None, make_bucket())
    torch.testing.assert_close(result.double(), exact_mean() / 4, rtol=0, atol=2e-9)


@run_on(threads=2)
def test_sparse_buckets_pass() -> None:
    rank = dist.get_rank()
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=True).coalesce()
    hook = chain(noop_hook, quantization_pertensor_hook)
    mean = run(hook, None, GradBucket(0, sparse, [torch.empty(4)], is_last=True))
    assert mean.to_dense().tolist() == [0.5, 0.5, 0.0, 0.0]


def stateful_chain() -> Any:
    return chain(
        noop_hook,
        (QuantizationState(error_feedback=True), quantization_perchannel_hook),
        (PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook),
    )


def steps(hook: Any, seeds: range) -> list[torch.Tensor]:
    buckets = [(make_bucket(index=i, is_last=i == 1, seed=seed)) for seed in seeds for i in range(2)]
    return [run(hook, None, bucket).clone() for bucket in buckets]


@run_on(threads=2)
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_the_states_are_saved_together(way: str) -> None:
    unbroken = stateful_chain()
    steps(unbroken, range(4))
    if way == "pickle":
        resumed = pickle.loads(pickle.dumps(unbroken))
    else:
        resumed = stateful_chain()
        resumed.load_state_dict(copy.deepcopy(unbroken.state_dict()))
    right, seen = steps(unbroken, range(4, 7)), steps(resumed, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(right, seen, strict=True))
    lost = steps(stateful_chain(), range(4, 7))
    assert not all(torch.equal(a, b) for a, b in zip(right, lost, strict=True))


def test_a_state_of_other_stages_is_refused() -> None:
    saved = stateful_chain().state_dict()
    assert list(saved) == ["1", "2"]
    with pytest.raises(weft.ConfigError, match="Make the chain from the same stages"):
        chain(noop_hook, allreduce_hook).load_state_dict(saved)


def test_a_chain_has_a_name() -> None:
    hook = chain(fp16_compress_wrapper, (None, allreduce_hook))
    assert hook.__qualname__ == "chain(fp16_compress_wrapper, allreduce_hook)"


def test_chains_that_cannot_work_are_refused() -> None:
    with pytest.raises(weft.ConfigError, match="at least one hook"):
        chain()
    with pytest.raises(weft.ConfigError, match="has no hook behind it"):
        chain(allreduce_hook, fp16_compress_wrapper)
    with pytest.raises(weft.ConfigError, match="a stage is a hook"):
        chain((None, 3))  # type: ignore[arg-type]
    with pytest.raises(weft.ConfigError, match="a stage is a hook"):
        chain(3)  # type: ignore[arg-type]


@run_on(threads=2)
def test_an_error_in_a_stage_comes_out() -> None:
    def failing_hook(state: Any, bucket: GradBucket) -> Any:
        raise KeyError("in the second stage")

    with pytest.raises(KeyError, match="in the second stage"):
        run(chain(allreduce_hook, failing_hook), None, make_bucket(SHAPES))
    assert every_rank().shape[0] == 2
