"""Backward: its roots, what it sums, when it returns, what it leaves alone, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist_autograd_bodies.sewing import (
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
)
from tests.rpc_bodies.places import kept, open_gate, pass_gate, visits
from tests.rpc_bodies.running import Worker, wait_until


def several_passes_add_up(w: Worker) -> None:
    """In one context; each context begins at nothing."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    for _ in range(2):
        with autograd(w.lib).context() as context_id:
            y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
            loss = (y * y).sum()
            for times in range(1, 4):
                autograd(w.lib).backward(context_id, [loss], retain_graph=times < 3)
                check(w, context_id, lambda x, p, times=times: times * (x * p * x * p).sum(), x, theirs)


def grads_of_leaves_stay(w: Worker) -> None:
    """A .grad from earlier is what it was, here and there, and a later loss.backward adds to it as ever."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    x.grad = before = quarters(5, 3)
    w.rpc.rpc_sync(w.next, set_grad, (w.lib, theirs.key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [(y * x).sum()])
        assert x.grad is before
        assert torch.equal(before, quarters(5, 3))
        assert torch.equal(w.rpc.rpc_sync(w.next, get_grad, (w.lib, theirs.key)), quarters(6, 3))
        expected = 2 * x.detach() * theirs.value.detach()
        assert torch.equal(autograd(w.lib).get_gradients(context_id)[x], expected)
    (x * 3).sum().backward()
    assert torch.equal(x.grad, quarters(5, 3) + 3)


def set_grad(lib: str, key: str) -> None:
    kept(lib, key).grad = quarters(6, 3)


def get_grad(lib: str, key: str) -> Tensor:
    return kept(lib, key).grad


def many_roots(w: Worker) -> None:
    """Of here, from there, and one as it came."""
    x, second, third = leaf(1, 3), plant(w, w.next, 2, 3), plant(w, w.after_next, 3, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, second.key, x))
        z = w.rpc.rpc_sync(w.after_next, scaled_sum, (w.lib, third.key, y))
        assert z.dim() == 0
        autograd(w.lib).backward(context_id, [y.sum(), z, (x * x).sum(), y[0:1]])
        check(
            w,
            context_id,
            lambda x, p, q: (x * p).sum() + (x * p * q).sum() + (x * x).sum() + (x * p)[0],
            x,
            second,
            third,
        )


def scaled_sum(lib: str, key: str, x: Tensor) -> Tensor:
    return (x * kept(lib, key)).sum()


def nothing_remote(w: Worker) -> None:
    """A pass that stays here gives gradients to the context all the same."""
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        autograd(w.lib).backward(context_id, [(x * x).sum()])
        check(w, context_id, lambda x: (x * x).sum(), x)


def parts_of_a_message(w: Worker) -> None:
    """Of what came in one message a part is used. The others have no gradient, as on one worker.

    torch gives them zeros.
    """
    x, y, theirs = leaf(1, 3), leaf(2, 3), plant(w, w.next, 3, 3)
    with autograd(w.lib).context() as context_id:
        parts = w.rpc.rpc_sync(w.next, three_parts, (w.lib, theirs.key, x, y))
        autograd(w.lib).backward(context_id, [parts[0].sum()])
        unused = "none" if w.is_weft else "zeros"
        check(w, context_id, lambda x, y, p: (x * 2).sum(), x, y, theirs, unused=unused)


def three_parts(lib: str, key: str, x: Tensor, y: Tensor) -> list[Tensor]:
    return [x * 2, y * 3, kept(lib, key) * 4]


def in_a_handler(w: Worker) -> None:
    """A worker that a call of the context reached runs the backward; the gradients are everyone's own."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.next, backward_here, (w.lib, context_id, theirs.key, x))
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def backward_here(lib: str, context_id: int, key: str, x: Tensor) -> None:
    autograd(lib).backward(context_id, [scale(lib, key, x).sum()])


def from_two_workers(w: Worker) -> None:
    """One after the other, in one context: their gradients add up."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()], retain_graph=True)
        rref = w.rpc.remote(w.after_next, torch.sum, (y,))
        rref.backward(context_id, True)
        check(w, context_id, lambda x, p: 2 * (x * p).sum(), x, theirs)


def backward_of_rrefs(w: Worker) -> None:
    """Of one that another worker owns, of one's own, and of one whose value came from elsewhere."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    makers: list[Callable[[], Any]] = [
        lambda: w.rpc.remote(w.next, scaled_sum, (w.lib, theirs.key, x)),
        lambda: w.rpc.RRef(w.rpc.rpc_sync(w.next, scaled_sum, (w.lib, theirs.key, x))),
        lambda: w.rpc.remote(w.after_next, pass_on, (w.lib, w.next, scaled_sum, w.lib, theirs.key, x)),
        lambda: w.rpc.remote(w.name, pass_on, (w.lib, w.next, scaled_sum, w.lib, theirs.key, x)),
    ]
    for make in makers:
        with autograd(w.lib).context() as context_id:
            make().backward(dist_autograd_ctx_id=context_id)
            check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)
    with autograd(w.lib).context() as context_id:
        rref = makers[0]()
        for times in [1, 2]:
            rref.backward(dist_autograd_ctx_id=context_id, retain_graph=times == 1)
            check(w, context_id, lambda x, p, times=times: times * (x * p).sum(), x, theirs)


def an_rrefs_backward_without_a_context(w: Worker) -> None:
    """An owner's is a plain backward; a user's needs the context; a value must be a tensor."""
    x = leaf(1, 3)
    w.rpc.RRef((x * x).sum()).backward()
    assert same(x.grad, 2 * x.detach())
    user = w.rpc.remote(w.next, torch.sum, (x,))
    user.to_here()
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        user.backward()
    with pytest.raises(RuntimeError, match="RRef should contain a tensor for"):
        w.rpc.RRef("text").backward()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345678"):
        w.rpc.RRef((x * x).sum()).backward(dist_autograd_ctx_id=12345678)


def returns_when_all_have_theirs(w: Worker) -> None:
    """A worker that takes its time keeps the root waiting; then every gradient is there."""
    key = f"slow {w.name}"
    x, theirs = leaf(1, 3), plant(w, w.after_next, 2, 3)
    w.rpc.rpc_sync(w.after_next, slow_down, (w.lib, theirs.key, key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, shift, w.lib, theirs.key, x)).sum()
        opener = w.rpc.rpc_async(w.after_next, open_when_reached, (w.lib, key))
        assert not opener.done()
        autograd(w.lib).backward(context_id, [y])
        assert w.rpc.rpc_sync(w.after_next, visits, (w.lib, f"at gate {key}")) == 1
        check(w, context_id, lambda x, p: (x + p).sum(), x, theirs)
        opener.wait()


def slow_down(lib: str, key: str, gate: str) -> None:
    """The leaf's gradient comes to a gate first."""
    kept(lib, key).register_hook(lambda gradient: pass_gate(lib, gate, gradient))


def open_when_reached(lib: str, gate: str) -> None:
    wait_until(lambda: visits(lib, f"at gate {gate}") == 1, "the hook has been reached")
    threading.Event().wait(0.1)  # a backward that doesn't wait for it would be back by now
    open_gate(lib, gate)


def a_second_pass_needs_the_graph(w: Worker) -> None:
    """Without retain_graph what the operators had saved is gone, there too."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        autograd(w.lib).backward(context_id, [y])
        with pytest.raises(RuntimeError, match="a second time"):
            autograd(w.lib).backward(context_id, [y])


def a_graph_in_two_parts(w: Worker) -> None:
    """Calls after a backward belong to the same context, and the next backward has them too."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()], retain_graph=True)
        z = w.rpc.rpc_sync(w.after_next, torch.mul, (y, 5))
        autograd(w.lib).backward(context_id, [z.sum()])
        check(w, context_id, lambda x, p: (x * p).sum() + (x * p * 5).sum(), x, theirs)


def roots_that_are_refused(w: Worker) -> None:
    """Each with torch's type and words; the context is as good as before."""
    backward = autograd(w.lib).backward
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
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
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def a_tuple_of_roots(w: Worker) -> None:
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 2))
        autograd(w.lib).backward(context_id, (y.sum(),))
        check(w, context_id, lambda x: (x * 2).sum(), x)


def under_no_grad(w: Worker) -> None:
    """The mode of whoever calls backward, or serves it, is no matter."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        with torch.no_grad():
            autograd(w.lib).backward(context_id, [y])
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)
        found = gather(w, context_id, x, theirs)
        assert [each.requires_grad for each in found if each is not None] == [False, False]


def a_deep_graph(w: Worker) -> None:
    """Sixty calls one after the other, round and round; far more than threads, and no stack overflows."""
    x, targets = leaf(1, 2), [plant(w, to, 2, 2, name="deep") for to in (w.next, w.after_next, w.name)]
    with autograd(w.lib).context() as context_id:
        y = x
        for i in range(60):
            each = targets[i % 3]
            y = w.rpc.rpc_sync(each.worker, shift, (w.lib, each.key, y))
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x, *ps: x.sum() + sum(20 * p.sum() for p in ps), x, *targets)


def a_ring_of_sends(w: Worker) -> None:
    """Each worker's part waits for another's twice over: a part runs when all it needs is there."""
    keep_ring(w)
    ring = [Planted(to, f"ring {w.name}", leaf(8, 2)) for to in (w.next, w.after_next)]
    x = leaf(1, 2)
    with autograd(w.lib).context() as context_id:
        a = w.rpc.rpc_sync(w.next, scale, (w.lib, ring[0].key, x))
        b = w.rpc.rpc_sync(w.after_next, scale, (w.lib, ring[1].key, a))
        c = w.rpc.rpc_sync(w.next, scale, (w.lib, ring[0].key, a + b))
        d = w.rpc.rpc_sync(w.after_next, scale, (w.lib, ring[1].key, b * c))
        autograd(w.lib).backward(context_id, [(a + b + c + d).sum()])

        def loss_of(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
            a = x * p
            b = a * q
            c = (a + b) * p
            return (a + b + c + b * c * q).sum()

        check(w, context_id, loss_of, x, *ring)


def keep_ring(w: Worker) -> None:
    for to in (w.next, w.after_next):
        w.rpc.rpc_sync(to, make_leaf, (w.lib, f"ring {w.name}", 8, (2,)))


BODIES = [
    several_passes_add_up,
    grads_of_leaves_stay,
    many_roots,
    nothing_remote,
    parts_of_a_message,
    in_a_handler,
    from_two_workers,
    backward_of_rrefs,
    an_rrefs_backward_without_a_context,
    returns_when_all_have_theirs,
    a_second_pass_needs_the_graph,
    a_graph_in_two_parts,
    roots_that_are_refused,
    a_tuple_of_roots,
    under_no_grad,
    a_deep_graph,
    a_ring_of_sends,
]
