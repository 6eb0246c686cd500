"""Contexts and groups of workers: small ones, few threads, ends and new beginnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.dist_autograd.leaves import leaf
from tests.dist_autograd.test_corners import test_a_hundred_calls as a_hundred_calls
from tests.dist_autograd.test_cuts import test_calls_back_to_the_caller as calls_back_to_the_caller
from tests.dist_autograd.test_cuts import test_nested_calls as nested_calls
from tests.dist_autograd.test_exact import test_unused_branches as unused_branches
from tests.dist_autograd.test_passes import test_a_deep_graph as a_deep_graph
from tests.dist_autograd.test_passes import test_a_ring_of_sends as a_ring_of_sends
from tests.dist_autograd.test_sharing import test_handlers_at_once as handlers_at_once
from tests.ranks import run_on
from tests.rpc.remote_functions import gate_of, pass_gate
from tests.rpc.workers import WEFT, Worker, takes, with_options
from weft import dist_autograd, rpc

LIMITS: dict[str, Any] = {"timeout": 90, "collective_timeout": 60}
Body = Callable[[Worker], None]

pytestmark = run_on(threads=2, timeout=60)


@run_on(
    threads=3,
    **LIMITS,
    body=[
        nested_calls,
        calls_back_to_the_caller,
        a_ring_of_sends,
        unused_branches,
        a_deep_graph,
        a_hundred_calls,
    ],
)
@with_options(num_worker_threads=1)
def test_one_thread_a_worker(worker: Worker, body: Body) -> None:
    """A part that waits for another's takes no thread of the pool."""
    body(worker)


@run_on(threads=3, **LIMITS)
@with_options(num_worker_threads=2)
def test_two_threads_and_many_contexts(worker: Worker) -> None:
    handlers_at_once(worker)


@run_on(threads=3, **LIMITS, body=[nested_calls, a_ring_of_sends, a_hundred_calls])
@with_options(max_in_flight=2)
def test_few_calls_in_flight(worker: Worker, body: Body) -> None:
    """Gradients go to a worker that is behind with its answers when it has answered."""
    body(worker)


def join() -> str:
    rpc.init_rpc(f"worker{dist.get_rank()}")
    return f"worker{(dist.get_rank() + 1) % dist.get_world_size()}"


def one_pass(other: str) -> int:
    x = leaf(1, 3)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(other, torch.mul, (x, 3))
        dist_autograd.backward(context_id, [y.sum()])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [3.0] * 3
    return context_id


def test_again_and_again() -> None:
    for _ in range(5):
        other = join()
        one_pass(other)
        rpc.shutdown()


def test_a_context_that_outlives_its_group() -> None:
    """It ends with the group; leaving the block is no error, and the next group has its own."""
    other = join()
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(other, torch.mul, (leaf(1, 3), 3))
        rpc.shutdown()
        with pytest.raises(RuntimeError):
            dist_autograd.backward(context_id, [y.sum()])
    other = join()
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        dist_autograd._current_context()
    one_pass(other)
    rpc.shutdown()


@run_on(threads=1, timeout=60)
def test_no_group() -> None:
    x = leaf(1, 3)
    for use in [
        lambda: dist_autograd.context().__enter__(),
        lambda: dist_autograd.backward(1, [x.sum()]),
        lambda: dist_autograd.get_gradients(1),
    ]:
        with pytest.raises(RuntimeError, match="init_rpc"):
            use()


def test_one_that_leaves_in_a_pass_is_named() -> None:
    """Without a word, while the other waits for its part."""
    other = join()
    if dist.get_rank() == 0:
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync(other, scale_at_gate, (leaf(1, 3),))
            dist.barrier()
            with takes(at_most_secs=5), pytest.raises(weft.PeerError, match=other) as caught:
                dist_autograd.backward(context_id, [y.sum()])
            assert caught.value.ranks == (1,)
        assert int(dist_autograd._get_debug_info()["num_autograd_contexts"]) == 0
        gate_of(other, "while it leaves").set()
        rpc.shutdown(graceful=False)
    else:
        dist.barrier()
        rpc.shutdown(graceful=False)


def scale_at_gate(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: pass_gate(WEFT, "while it leaves", gradient))
    return x * 2
