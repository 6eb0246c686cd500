"""Corners: where threads, callbacks, inner gradients and odd options meet a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist_autograd.leaves import (
    added,
    autograd,
    check,
    everyone,
    leaf,
    own,
    plant,
    quarters,
    run_thread,
    same,
    scale,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import keep, kept
from tests.rpc.workers import Worker, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
ON_PROCESSES = run_on(weft=3, timeout=90, collective_timeout=60)


def test_first_operations_of_threads(worker: Worker) -> None:
    """Every thread of the pool works, as the first thing it does, on what came from elsewhere."""
    x = leaf(1, 2, 2)
    rref = worker.rpc.RRef(x)
    with autograd(worker.lib).context() as context_id:
        futures = [worker.rpc.rpc_async(worker.next, fetch_and_multiply, (rref,)) for _ in range(12)]
        autograd(worker.lib).backward(context_id, [added(future.wait() for future in futures).sum()])
        check(worker, context_id, lambda x: 12 * (x @ x).sum(), x)


def fetch_and_multiply(rref: Any) -> Tensor:
    x = rref.to_here()
    return x @ x


@ON_PROCESSES
def test_made_on_another_thread(worker: Worker) -> None:
    """What was received is worked on by a thread that has never recorded anything, here and there."""
    x, made = leaf(1, 2, 2), []
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, multiply_on_a_thread, (x,))
        run_thread(lambda: made.append(y @ y))
        autograd(worker.lib).backward(context_id, [made[0].sum()])
        check(worker, context_id, lambda x: (x @ x @ x @ x).sum(), x)


def multiply_on_a_thread(x: Tensor) -> Tensor:
    made: list[Tensor] = []
    run_thread(lambda: made.append(x @ x))
    return made[0]


def test_gradients_of_gradients(worker: Worker) -> None:
    """A penalty on a gradient that torch.autograd.grad took of what was received, here and there."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, penalized, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [penalty(y * y, y)])

        def loss_of(x: Tensor, p: Tensor) -> Tensor:
            y = penalty(x * x * p, x) + x * p
            return penalty(y * y, y)

        check(worker, context_id, loss_of, x, theirs)


def penalty(y: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (gradient * gradient).sum()


def penalized(lib: str, key: str, x: Tensor) -> Tensor:
    p = kept(lib, key)
    return penalty(x * x * p, x) + x * p


@weft_only
def test_a_parameter_as_result(worker: Worker) -> None:
    """It is cut as any tensor. torch sends a new Parameter, which nothing leads back from."""
    key = f"parameter of {worker.name}"
    worker.rpc.rpc_sync(worker.next, keep_parameter, (worker.lib, key))
    with autograd(worker.lib).context() as context_id:
        p, again = (worker.rpc.rpc_sync(worker.next, own, (worker.lib, key)) for _ in range(2))
        assert not p.is_leaf
        autograd(worker.lib).backward(context_id, [(p * again).sum()])
        found = worker.rpc.rpc_sync(worker.next, parameter_gradient, (worker.lib, context_id, key))
        assert torch.equal(found, 2 * quarters(4, 3))


def keep_parameter(lib: str, key: str) -> None:
    keep(lib, key, nn.Parameter(quarters(4, 3)))


def parameter_gradient(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key)]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode(worker: Worker) -> None:
    if worker.rank != 0:  # it is the process's: of two threads that leave it the last would leave it on
        return
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with torch.autograd.set_detect_anomaly(True), autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [(y * y).sum()])
        check(worker, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)


def test_a_hundred_calls(worker: Worker) -> None:
    """Two hundred cuts in one worker's part, one behind the other, and beside each other."""
    x, theirs = leaf(1, 2), plant(worker, worker.next, 2, 2)
    with autograd(worker.lib).context() as context_id:
        y = x
        for _ in range(100):
            y = worker.rpc.rpc_sync(worker.next, torch.add, (y, 1))
        futures = [worker.rpc.rpc_async(worker.next, scale, (worker.lib, theirs.key, y)) for _ in range(100)]
        autograd(worker.lib).backward(context_id, [added(future.wait() for future in futures).sum()])
        check(worker, context_id, lambda x, p: (100 * (x + 100) * p).sum(), x, theirs)


@weft_only
def test_after_a_call_that_failed(worker: Worker) -> None:
    """Its arguments get nothing, and nobody waits for them in an exact pass."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        with pytest.raises(ValueError, match="meant"):
            worker.rpc.rpc_sync(worker.next, fail_after_use, (worker.lib, theirs.key, x))
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()], exact=True)
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


def fail_after_use(lib: str, key: str, x: Tensor) -> None:
    scale(lib, key, x)
    raise ValueError("meant")


SHARED = leaf(33, 3)  # of thread-ranks, which share this module


def scale_shared(x: Tensor) -> Tensor:
    return x * SHARED


def shared_gradient(lib: str, context_id: int) -> Tensor | None:
    return autograd(lib).get_gradients(context_id).get(SHARED)


@weft_only
@run_on(threads=3, timeout=90, collective_timeout=60)
def test_one_leaf_of_all_workers(worker: Worker) -> None:
    """Workers that are threads may share a leaf: each has its own part of the gradient in its context."""
    x = leaf(1, 3)
    for _ in range(5):
        with autograd(worker.lib).context() as context_id:
            y = x
            for i, to in enumerate([worker.next, worker.after_next]):
                y = y + (i + 2) * worker.rpc.rpc_sync(to, scale_shared, (x,))
            autograd(worker.lib).backward(context_id, [(y + x * SHARED).sum()])
            found = [
                worker.rpc.rpc_sync(to, shared_gradient, (worker.lib, context_id)) for to in everyone(worker)
            ]
            factors = {worker.name: 1, worker.next: 2, worker.after_next: 3}
            for to, gradient in zip(everyone(worker), found, strict=True):
                assert same(gradient, factors[to] * x.detach()), (to, gradient)
    assert SHARED.grad is None


def test_under_inference_mode(worker: Worker) -> None:
    """Of a call made in it nothing is recorded."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        with torch.inference_mode():
            assert worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2)).is_leaf
        autograd(worker.lib).backward(context_id, [y])
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)
