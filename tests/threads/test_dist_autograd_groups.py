"""Contexts and groups of workers: small ones, few threads, ends and new beginnings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from tests.dist_autograd_bodies import contexts, corners, cuts, exact, passes, sharing
from tests.dist_autograd_bodies.sewing import leaf
from tests.rpc_bodies.places import gate_of, pass_gate
from tests.rpc_bodies.running import WEFT, Body, on_threads, takes
from weft import dist_autograd, rpc
from weft.testing import on_ranks

FEW = [cuts.nested_calls, cuts.calls_back_to_the_caller, passes.a_ring_of_sends, exact.unused_branches]


def test_one_thread_a_worker() -> None:
    """A part that waits for another's takes no thread of the pool."""
    on_threads([*FEW, passes.a_deep_graph, corners.a_hundred_calls], num_worker_threads=1)


def test_two_threads_and_many_contexts() -> None:
    on_threads(sharing.handlers_at_once, num_worker_threads=2)


def test_few_calls_in_flight() -> None:
    """Gradients go to a worker that is behind with its answers when it has answered."""
    on_threads([cuts.nested_calls, passes.a_ring_of_sends, corners.a_hundred_calls], max_in_flight=2)


@pytest.mark.parametrize("body", [contexts.one_a_thread, passes.nothing_remote, passes.a_tuple_of_roots])
def test_one_worker_is_a_world(body: Body) -> None:
    on_threads(body, ranks=1)


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


@on_ranks(2)
def test_again_and_again() -> None:
    for _ in range(5):
        other = join()
        one_pass(other)
        rpc.shutdown()


@on_ranks(2)
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


@on_ranks(1)
def test_no_group() -> None:
    x = leaf(1, 3)
    for use in [
        lambda: dist_autograd.context().__enter__(),
        lambda: dist_autograd.backward(1, [x.sum()]),
        lambda: dist_autograd.get_gradients(1),
    ]:
        with pytest.raises(RuntimeError, match="init_rpc"):
            use()


@on_ranks(2)
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
