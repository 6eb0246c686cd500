"""Hooks of several collectives: every rank launches in the order of calls, whoever ends first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.comm_hooks.buckets import exact_mean, make_bucket
from tests.ranks import run_on
from weft import comm
from weft.comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from weft.comm_hooks.in_order import launch_in_order, queue_of, run_in_order
from weft.comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook

NUM_BUCKETS = 6


def compressing_state() -> PowerSGDState:
    """PowerSGD from the first step on; exact, since the rank is that of the matrices."""
    return PowerSGDState(
        None,
        matrix_approximation_rank=64,
        start_powerSGD_iter=0,
        use_error_feedback=False,
        warm_start=False,
        min_compression_rate=0.0,
    )


HOOKS = [
    (quantization_pertensor_hook, lambda: None, 1e-4),
    (quantization_perchannel_hook, lambda: None, 1e-4),
    (powerSGD_hook, compressing_state, 1e-7),
    (batched_powerSGD_hook, compressing_state, 1e-7),
]


def order_of(events: Any) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    return [(event.op, event.shapes) for event in sorted(events, key=lambda event: event.start_secs)]


@run_on(threads=2)
@run_on(threads=4, full=True)
@pytest.mark.parametrize(("hook", "make_state", "tolerance"), HOOKS)
def test_many_buckets_at_once(hook: Any, make_state: Any, tolerance: float) -> None:
    """Ranks call all hooks at once and wait from the last to the first."""
    state = make_state()
    with weft.record() as events:
        futures = [
            hook(state, make_bucket(index=index, is_last=index == NUM_BUCKETS - 1, seed=index))
            for index in range(NUM_BUCKETS)
        ]
        results = [future.wait() for future in reversed(futures)][::-1]
    for index, result in enumerate(results):
        torch.testing.assert_close(result.double(), exact_mean(seed=index), rtol=0, atol=tolerance)
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, order_of(events))
    assert len(orders[0]) == 2 * NUM_BUCKETS
    assert all(order == orders[0] for order in orders)


@run_on(threads=3)
def test_hooks_of_one_collective_queue_behind_those_of_several() -> None:
    """Two models with different hooks on one group, in one backward."""
    hooks = [quantization_perchannel_hook, allreduce_hook, quantization_pertensor_hook, fp16_compress_hook]
    with weft.desync_check():
        futures = [
            hooks[index % 4](None, make_bucket(index=index, is_last=False, seed=index)) for index in range(12)
        ]
        for index, future in enumerate(futures):
            torch.testing.assert_close(future.wait().double(), exact_mean(seed=index), rtol=0, atol=1e-4)


@run_on(threads=2)
def test_a_body_runs_when_those_before_it_have_ended() -> None:
    group, gate, ran = dist.group.WORLD, threading.Event(), []
    tensor = torch.ones(1)

    def first() -> int:
        assert gate.wait(30)
        ran.append("first")
        return 1

    futures = [run_in_order(group, tensor, first), run_in_order(group, tensor, lambda: ran.append("second"))]
    last = launch_in_order(group, tensor, lambda: comm.all_reduce(torch.ones(1)))
    assert ran == []
    assert not queue_of(group).is_idle
    gate.set()
    assert last.wait().item() == 2.0
    assert futures[0].wait() == 1
    futures[1].wait()
    assert ran == ["first", "second"]
    assert queue_of(group).is_idle


@run_on(threads=2)
def test_a_body_inside_a_body_runs_at_once() -> None:
    group, tensor = dist.group.WORLD, torch.ones(1)

    def outer() -> float:
        inner = run_in_order(group, tensor, lambda: comm.all_reduce(torch.ones(1)).wait().item())
        alone = launch_in_order(group, tensor, lambda: comm.all_reduce(torch.ones(1)))
        return inner.wait() + alone.wait().item()

    assert run_in_order(group, tensor, outer).wait() == 4.0


@run_on(threads=2)
def test_an_error_comes_out_of_its_future_and_the_next_body_runs() -> None:
    group, tensor = dist.group.WORLD, torch.ones(1)

    def fail() -> None:
        raise weft.ConfigError("this one")

    failed = run_in_order(group, tensor, fail)
    fine = run_in_order(group, tensor, lambda: comm.all_reduce(torch.ones(1)).wait().item())
    with pytest.raises(weft.ConfigError, match="this one"):
        failed.wait()
    assert fine.wait() == 2.0
    inside = run_in_order(group, tensor, lambda: run_in_order(group, tensor, fail).wait())
    with pytest.raises(weft.ConfigError, match="this one"):
        inside.wait()


@run_on(threads=2)
def test_bodies_build_no_graph() -> None:
    bucket = make_bucket()
    bucket.buffer().requires_grad_()
    with torch.no_grad():
        future = quantization_perchannel_hook(None, bucket)
    assert future.wait().grad_fn is None


@pytest.mark.threads
def test_a_rank_that_dies_is_named() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            raise KeyError("gone")
        futures = [quantization_perchannel_hook(None, make_bucket(seed=seed)) for seed in range(2)]
        for future in futures:
            with pytest.raises(weft.PeerError, match="rank 1"):
                future.wait()
        return "told"

    with pytest.raises(weft.LaunchError, match="gone") as caught:
        weft.launch(body, ranks=2, kind="thread", timeout=30, collective_timeout=10)
    assert list(caught.value.failures) == [1]
