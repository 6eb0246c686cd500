"""Backward: its roots, what it sums, when it returns, what it leaves alone, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist_autograd.leaves import (
    Planted,
    autograd,
    check,
    gather,
    leaf,
    make_leaf,
    pass_on,
    plant,
    quarters,
    same,
    scale,
    shift,
    slow_down,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import kept, open_gate, visits
from tests.rpc.workers import Worker, wait_until

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


@EVERYDAY
def test_several_passes_add_up(worker: Worker) -> None:
    """In one context; each context begins at nothing."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    for _ in range(2):
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
            loss = (y * y).sum()
            for times in range(1, 4):
                autograd(worker.lib).backward(context_id, [loss], retain_graph=times < 3)
                check(worker, context_id, lambda x, p, times=times: times * (x * p * x * p).sum(), x, theirs)


def test_grad_of_leaves_stays_as_it_is(worker: Worker) -> None:
    """A .grad from earlier is what it was, here and there, and a later loss.backward adds to it as ever."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    x.grad = before = quarters(5, 3)
    worker.rpc.rpc_sync(worker.next, set_grad, (worker.lib, theirs.key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [(y * x).sum()])
        assert x.grad is before
        assert torch.equal(before, quarters(5, 3))
        assert torch.equal(
            worker.rpc.rpc_sync(worker.next, get_grad, (worker.lib, theirs.key)), quarters(6, 3)
        )
        expected = 2 * x.detach() * theirs.value.detach()
        assert torch.equal(autograd(worker.lib).get_gradients(context_id)[x], expected)
    (x * 3).sum().backward()
    assert torch.equal(x.grad, quarters(5, 3) + 3)


def set_grad(lib: str, key: str) -> None:
    kept(lib, key).grad = quarters(6, 3)


def get_grad(lib: str, key: str) -> Tensor:
    return kept(lib, key).grad


def test_many_roots(worker: Worker) -> None:
    """Of here, from there, and one as it came."""
    x, second, third = leaf(1, 3), plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, second.key, x))
        z = worker.rpc.rpc_sync(worker.after_next, scaled_sum, (worker.lib, third.key, y))
        assert z.dim() == 0
        autograd(worker.lib).backward(context_id, [y.sum(), z, (x * x).sum(), y[0:1]])
        check(
            worker,
            context_id,
            lambda x, p, q: (x * p).sum() + (x * p * q).sum() + (x * x).sum() + (x * p)[0],
            x,
            second,
            third,
        )


def scaled_sum(lib: str, key: str, x: Tensor) -> Tensor:
    return (x * kept(lib, key)).sum()


@run_on(threads=1, timeout=90, collective_timeout=60, also=True)
def test_nothing_remote(worker: Worker) -> None:
    """A pass that stays here gives gradients to the context all the same."""
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [(x * x).sum()])
        check(worker, context_id, lambda x: (x * x).sum(), x)


def test_parts_of_a_message(worker: Worker) -> None:
    """Of what came in one message a part is used. The others have no gradient, as on one worker.

    torch gives them zeros.
    """
    x, y, theirs = leaf(1, 3), leaf(2, 3), plant(worker, worker.next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        parts = worker.rpc.rpc_sync(worker.next, three_parts, (worker.lib, theirs.key, x, y))
        autograd(worker.lib).backward(context_id, [parts[0].sum()])
        unused = "none" if worker.is_weft else "zeros"
        check(worker, context_id, lambda x, y, p: (x * 2).sum(), x, y, theirs, unused=unused)


def three_parts(lib: str, key: str, x: Tensor, y: Tensor) -> list[Tensor]:
    return [x * 2, y * 3, kept(lib, key) * 4]


def test_backward_in_a_handler(worker: Worker) -> None:
    """A worker that a call of the context reached runs the backward; the gradients are everyone's own."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(worker.next, backward_here, (worker.lib, context_id, theirs.key, x))
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


def backward_here(lib: str, context_id: int, key: str, x: Tensor) -> None:
    autograd(lib).backward(context_id, [scale(lib, key, x).sum()])


def test_backward_from_two_workers(worker: Worker) -> None:
    """One after the other, in one context: their gradients add up."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()], retain_graph=True)
        rref = worker.rpc.remote(worker.after_next, torch.sum, (y,))
        rref.backward(context_id, True)
        check(worker, context_id, lambda x, p: 2 * (x * p).sum(), x, theirs)


def test_backward_of_rrefs(worker: Worker) -> None:
    """Of one that another worker owns, of one's own, and of one whose value came from elsewhere."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    makers: list[Callable[[], Any]] = [
        lambda: worker.rpc.remote(worker.next, scaled_sum, (worker.lib, theirs.key, x)),
        lambda: worker.rpc.RRef(worker.rpc.rpc_sync(worker.next, scaled_sum, (worker.lib, theirs.key, x))),
        lambda: worker.rpc.remote(
            worker.after_next, pass_on, (worker.lib, worker.next, scaled_sum, worker.lib, theirs.key, x)
        ),
        lambda: worker.rpc.remote(
            worker.name, pass_on, (worker.lib, worker.next, scaled_sum, worker.lib, theirs.key, x)
        ),
    ]
    for make in makers:
        with autograd(worker.lib).context() as context_id:
            make().backward(dist_autograd_ctx_id=context_id)
            check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)
    with autograd(worker.lib).context() as context_id:
        rref = makers[0]()
        for times in [1, 2]:
            rref.backward(dist_autograd_ctx_id=context_id, retain_graph=times == 1)
            check(worker, context_id, lambda x, p, times=times: times * (x * p).sum(), x, theirs)


def test_an_rrefs_backward_without_a_context(worker: Worker) -> None:
    """An owner's is a plain backward; a user's needs the context; a value must be a tensor."""
    x = leaf(1, 3)
    worker.rpc.RRef((x * x).sum()).backward()
    assert same(x.grad, 2 * x.detach())
    user = worker.rpc.remote(worker.next, torch.sum, (x,))
    user.to_here()
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        user.backward()
    with pytest.raises(RuntimeError, match="RRef should contain a tensor for"):
        worker.rpc.RRef("text").backward()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345678"):
        worker.rpc.RRef((x * x).sum()).backward(dist_autograd_ctx_id=12345678)


@EVERYDAY
def test_backward_returns_when_all_have_their_gradients(worker: Worker) -> None:
    """A worker that takes its time keeps the root waiting; then every gradient is there."""
    key = f"slow {worker.name}"
    x, theirs = leaf(1, 3), plant(worker, worker.after_next, 2, 3)
    worker.rpc.rpc_sync(worker.after_next, slow_down, (worker.lib, theirs.key, key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, pass_on, (worker.lib, worker.after_next, shift, worker.lib, theirs.key, x)
        ).sum()
        opener = worker.rpc.rpc_async(worker.after_next, open_when_reached, (worker.lib, key))
        assert not opener.done()
        autograd(worker.lib).backward(context_id, [y])
        assert worker.rpc.rpc_sync(worker.after_next, visits, (worker.lib, f"at gate {key}")) == 1
        check(worker, context_id, lambda x, p: (x + p).sum(), x, theirs)
        opener.wait()


def open_when_reached(lib: str, gate: str) -> None:
    wait_until(lambda: visits(lib, f"at gate {gate}") == 1, "the hook has been reached")
    threading.Event().wait(0.1)  # a backward that doesn't wait for it would be back by now
    open_gate(lib, gate)


def test_a_second_pass_needs_the_graph(worker: Worker) -> None:
    """Without retain_graph what the operators had saved is gone, there too."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        autograd(worker.lib).backward(context_id, [y])
        with pytest.raises(RuntimeError, match="a second time"):
            autograd(worker.lib).backward(context_id, [y])


def test_a_graph_in_two_parts(worker: Worker) -> None:
    """Calls after a backward belong to the same context, and the next backward has them too."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()], retain_graph=True)
        z = worker.rpc.rpc_sync(worker.after_next, torch.mul, (y, 5))
        autograd(worker.lib).backward(context_id, [z.sum()])
        check(worker, context_id, lambda x, p: (x * p).sum() + (x * p * 5).sum(), x, theirs)


def test_roots_that_are_refused(worker: Worker) -> None:
    """Each with torch's type and words; the context is as good as before."""
    backward = autograd(worker.lib).backward
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        wrong_arguments: list[tuple[Any, ...]] = [
            (context_id, None),
            (None, None),
            (context_id, [None]),
            (context_id, ["text"]),
            (context_id, y.sum()),
            ("text", [y.sum()]),
        ]
        for arguments in wrong_arguments:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                backward(*arguments)
        for arguments in [(), (context_id,)]:
            with pytest.raises(TypeError):
                backward(*arguments)
        refused: list[tuple[list[Tensor], str]] = [
            ([], "No tensors provided for gradient computation"),
            ([torch.ones(())], "requires_grad not set on"),
            ([y.sum(), torch.ones(1)], "requires_grad not set on"),
            ([y], "is not a scalar, all roots need to be scalar"),
            ([y.sum(), x], "is not a scalar, all roots need to be scalar"),
            ([leaf(1, 1)], "does not have a valid gradient function"),
        ]
        for roots, words in refused:
            with pytest.raises(RuntimeError, match=words):
                backward(context_id, roots)
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 1000"):
            backward(1000, [y.sum()])
        backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


@run_on(threads=1, timeout=90, collective_timeout=60, also=True)
def test_a_tuple_of_roots(worker: Worker) -> None:
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2))
        autograd(worker.lib).backward(context_id, (y.sum(),))
        check(worker, context_id, lambda x: (x * 2).sum(), x)


def test_backward_under_no_grad(worker: Worker) -> None:
    """The mode of whoever calls backward, or serves it, is no matter."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        with torch.no_grad():
            autograd(worker.lib).backward(context_id, [y])
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)
        found = gather(worker, context_id, x, theirs)
        assert [each.requires_grad for each in found if each is not None] == [False, False]


def test_a_deep_graph(worker: Worker) -> None:
    """Sixty calls one after the other, round and round; far more than threads, and no stack overflows."""
    x = leaf(1, 2)
    targets = [plant(worker, to, 2, 2, name="deep") for to in (worker.next, worker.after_next, worker.name)]
    with autograd(worker.lib).context() as context_id:
        y = x
        for i in range(60):
            each = targets[i % 3]
            y = worker.rpc.rpc_sync(each.worker, shift, (worker.lib, each.key, y))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, *ps: x.sum() + sum(20 * p.sum() for p in ps), x, *targets)


def test_a_ring_of_sends(worker: Worker) -> None:
    """Each worker's part waits for another's twice over: a part runs when all it needs is there."""
    keep_ring(worker)
    ring = [Planted(to, f"ring {worker.name}", leaf(8, 2)) for to in (worker.next, worker.after_next)]
    x = leaf(1, 2)
    with autograd(worker.lib).context() as context_id:
        a = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, ring[0].key, x))
        b = worker.rpc.rpc_sync(worker.after_next, scale, (worker.lib, ring[1].key, a))
        c = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, ring[0].key, a + b))
        d = worker.rpc.rpc_sync(worker.after_next, scale, (worker.lib, ring[1].key, b * c))
        autograd(worker.lib).backward(context_id, [(a + b + c + d).sum()])

        def loss_of(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
            a = x * p
            b = a * q
            c = (a + b) * p
            return (a + b + c + b * c * q).sum()

        check(worker, context_id, loss_of, x, *ring)


def keep_ring(w: Worker) -> None:
    for to in (w.next, w.after_next):
        w.rpc.rpc_sync(to, make_leaf, (w.lib, f"ring {w.name}", 8, (2,)))
