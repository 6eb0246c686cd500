"""Corners: where threads, callbacks, inner gradients and odd options meet a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist_autograd_bodies.contexts import run_thread
from tests.dist_autograd_bodies.sewing import (
    added,
    autograd,
    check,
    everyone,
    leaf,
    own,
    plant,
    quarters,
    same,
    scale,
)
from tests.rpc_bodies.places import keep, kept
from tests.rpc_bodies.running import Worker


def first_operations_of_threads(w: Worker) -> None:
    """Every thread of the pool works, as the first thing it does, on what came from elsewhere."""
    x = leaf(1, 2, 2)
    rref = w.rpc.RRef(x)
    with autograd(w.lib).context() as context_id:
        futures = [w.rpc.rpc_async(w.next, fetch_and_multiply, (rref,)) for _ in range(12)]
        autograd(w.lib).backward(context_id, [added(future.wait() for future in futures).sum()])
        check(w, context_id, lambda x: 12 * (x @ x).sum(), x)


def fetch_and_multiply(rref: Any) -> Tensor:
    x = rref.to_here()
    return x @ x


def made_on_another_thread(w: Worker) -> None:
    """What was received is worked on by a thread that has never recorded anything, here and there."""
    x, made = leaf(1, 2, 2), []
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, multiply_on_a_thread, (x,))
        run_thread(lambda: made.append(y @ y))
        autograd(w.lib).backward(context_id, [made[0].sum()])
        check(w, context_id, lambda x: (x @ x @ x @ x).sum(), x)


def multiply_on_a_thread(x: Tensor) -> Tensor:
    made: list[Tensor] = []
    run_thread(lambda: made.append(x @ x))
    return made[0]


def gradients_of_gradients(w: Worker) -> None:
    """A penalty on a gradient that torch.autograd.grad took of what was received, here and there."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, penalized, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [penalty(y * y, y)])

        def loss_of(x: Tensor, p: Tensor) -> Tensor:
            y = penalty(x * x * p, x) + x * p
            return penalty(y * y, y)

        check(w, context_id, loss_of, x, theirs)


def penalty(y: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (gradient * gradient).sum()


def penalized(lib: str, key: str, x: Tensor) -> Tensor:
    p = kept(lib, key)
    return penalty(x * x * p, x) + x * p


def a_parameter_as_result(w: Worker) -> None:
    """It is cut as any tensor. torch sends a new Parameter, which nothing leads back from."""
    key = f"parameter of {w.name}"
    w.rpc.rpc_sync(w.next, keep_parameter, (w.lib, key))
    with autograd(w.lib).context() as context_id:
        p, again = w.rpc.rpc_sync(w.next, own, (w.lib, key)), w.rpc.rpc_sync(w.next, own, (w.lib, key))
        assert not p.is_leaf
        autograd(w.lib).backward(context_id, [(p * again).sum()])
        found = w.rpc.rpc_sync(w.next, parameter_gradient, (w.lib, context_id, key))
        assert torch.equal(found, 2 * quarters(4, 3))


def keep_parameter(lib: str, key: str) -> None:
    keep(lib, key, nn.Parameter(quarters(4, 3)))


def parameter_gradient(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key)]


def anomaly_mode(w: Worker) -> None:
    if w.rank != 0:  # it is the process's: of two threads that leave it the last would leave it on
        return
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with torch.autograd.set_detect_anomaly(True), autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [(y * y).sum()])
        check(w, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)


def a_hundred_calls(w: Worker) -> None:
    """Two hundred cuts in one worker's part, one behind the other, and beside each other."""
    x, theirs = leaf(1, 2), plant(w, w.next, 2, 2)
    with autograd(w.lib).context() as context_id:
        y = x
        for _ in range(100):
            y = w.rpc.rpc_sync(w.next, torch.add, (y, 1))
        futures = [w.rpc.rpc_async(w.next, scale, (w.lib, theirs.key, y)) for _ in range(100)]
        autograd(w.lib).backward(context_id, [added(future.wait() for future in futures).sum()])
        check(w, context_id, lambda x, p: (100 * (x + 100) * p).sum(), x, theirs)


def after_a_call_that_failed(w: Worker) -> None:
    """Its arguments get nothing, and nobody waits for them in an exact pass."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        with pytest.raises(ValueError, match="meant"):
            w.rpc.rpc_sync(w.next, fail_after_use, (w.lib, theirs.key, x))
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()], exact=True)
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def fail_after_use(lib: str, key: str, x: Tensor) -> None:
    scale(lib, key, x)
    raise ValueError("meant")


SHARED = leaf(33, 3)  # of thread-ranks, which share this module


def scale_shared(x: Tensor) -> Tensor:
    return x * SHARED


def shared_gradient(lib: str, context_id: int) -> Tensor | None:
    return autograd(lib).get_gradients(context_id).get(SHARED)


def one_leaf_of_all_workers(w: Worker) -> None:
    """Workers that are threads may share a leaf: each has its own part of the gradient in its context."""
    x = leaf(1, 3)
    for _ in range(5):
        with autograd(w.lib).context() as context_id:
            y = x
            for i, to in enumerate([w.next, w.after_next]):
                y = y + (i + 2) * w.rpc.rpc_sync(to, scale_shared, (x,))
            autograd(w.lib).backward(context_id, [(y + x * SHARED).sum()])
            found = [w.rpc.rpc_sync(to, shared_gradient, (w.lib, context_id)) for to in everyone(w)]
            factors = {w.name: 1, w.next: 2, w.after_next: 3}
            for to, gradient in zip(everyone(w), found, strict=True):
                assert same(gradient, factors[to] * x.detach()), (to, gradient)
    assert SHARED.grad is None


def under_inference_mode(w: Worker) -> None:
    """Of a call made in it nothing is recorded."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        with torch.inference_mode():
            assert w.rpc.rpc_sync(w.next, torch.mul, (x, 2)).is_leaf
        autograd(w.lib).backward(context_id, [y])
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


BODIES = [
    first_operations_of_threads,
    gradients_of_gradients,
    anomaly_mode,
    a_hundred_calls,
    under_inference_mode,
]
ON_PROCESSES = [made_on_another_thread]
WEFT_ONLY = [a_parameter_as_result, after_a_call_that_failed]
ON_THREADS = [one_leaf_of_all_workers]
