"""What torch doesn't have: exact=True, where what isn't used never makes backward wait; and gradients=."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from tests.dist_autograd_bodies.sewing import (
    autograd,
    check,
    debug_counts,
    everyone,
    leaf,
    pass_on,
    plant,
    quarters,
    scale,
)
from tests.rpc_bodies.places import give, kept, open_gate, pass_gate, visits
from tests.rpc_bodies.running import Worker, takes, wait_until

WAIT_SECS = 1.0  # the RPC timeout of the bodies in SHORT_TIMEOUT


def unused_results(w: Worker) -> None:
    """Of calls to every worker, of each kind, of which one is used."""
    x = leaf(1, 3)
    targets = [plant(w, to, 2, 3, name="unused") for to in everyone(w)]
    for used in targets:
        with autograd(w.lib).context() as context_id:
            results = [w.rpc.rpc_sync(each.worker, scale, (w.lib, each.key, x)) for each in targets]
            futures = [w.rpc.rpc_async(each.worker, scale, (w.lib, each.key, x)) for each in targets]
            rrefs = [w.rpc.remote(each.worker, scale, (w.lib, each.key, x)) for each in targets]
            fetched = [rref.to_here() for rref in rrefs]
            torch.futures.wait_all(futures)
            loss = results[targets.index(used)].sum()
            del fetched
            with takes(at_most_secs=10):
                autograd(w.lib).backward(context_id, [loss], exact=True)
            check(w, context_id, lambda x, p: (x * p).sum(), x, used)


def unused_arguments(w: Worker) -> None:
    """The callee's result has nothing to do with one argument, or with any."""
    x, y, theirs = leaf(1, 3), leaf(2, 3), plant(w, w.next, 3, 3)
    with autograd(w.lib).context() as context_id:
        first = w.rpc.rpc_sync(w.next, scale_first, (w.lib, theirs.key, x, y))
        own = w.rpc.rpc_sync(w.next, ignore, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [(first * own).sum()], exact=True)
        check(w, context_id, lambda x, y, p: (x * p * p).sum(), x, y, theirs)


def scale_first(lib: str, key: str, x: Tensor, y: Tensor) -> Tensor:
    return x * kept(lib, key)


def ignore(lib: str, key: str, x: Tensor) -> Tensor:
    return kept(lib, key)


def unused_branches(w: Worker) -> None:
    """A nested call whose result its caller drops; a chain of calls that ends nowhere; a local loss only."""
    x, second, third = leaf(1, 3), plant(w, w.next, 2, 3), plant(w, w.after_next, 3, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale_and_waste, (w.lib, second.key, third.worker, third.key, x))
        dead = y
        for to in [w.after_next, w.next, w.name]:
            dead = w.rpc.rpc_sync(to, torch.mul, (dead, 2))
        autograd(w.lib).backward(context_id, [y.sum()], exact=True)
        check(w, context_id, lambda x, p: (x * p).sum(), x, second)
    with autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.next, scale_and_waste, (w.lib, second.key, third.worker, third.key, x))
        autograd(w.lib).backward(context_id, [(x * x).sum()], exact=True)
        check(w, context_id, lambda x: (x * x).sum(), x)


def scale_and_waste(lib: str, key: str, to: str, its_key: str, x: Tensor) -> Tensor:
    y = scale(lib, key, x)
    import_module(lib).rpc_sync(to, scale, (lib, its_key, y))
    return y


def one_loss_after_another(w: Worker) -> None:
    """Each pass of a context takes the part of the graph that its loss needs; fast when that is all of it."""
    x, second, third = leaf(1, 3), plant(w, w.next, 2, 3), plant(w, w.after_next, 3, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, second.key, x))
        z = w.rpc.rpc_sync(w.after_next, scale, (w.lib, third.key, y))
        autograd(w.lib).backward(context_id, [y.sum()], retain_graph=True, exact=True)
        check(w, context_id, lambda x, p: (x * p).sum(), x, second)
        autograd(w.lib).backward(context_id, [z.sum()], retain_graph=True, exact=True)
        check(w, context_id, lambda x, p, q: (x * p).sum() + (x * p * q).sum(), x, second, third)
        autograd(w.lib).backward(context_id, [(y * z).sum()], retain_graph=True)
        autograd(w.lib).backward(context_id, [z.sum()], exact=True)
        check(
            w,
            context_id,
            lambda x, p, q: (x * p).sum() + 2 * (x * p * q).sum() + (x * p * x * p * q).sum(),
            x,
            second,
            third,
        )


def fast_and_exact_agree(w: Worker) -> None:
    """Where everything is used."""
    x = leaf(1, 3)
    targets = [plant(w, to, 2, 3, name="agree") for to in everyone(w)]
    for exact in [False, True]:
        with autograd(w.lib).context() as context_id:
            y = x
            for each in targets * 3:
                y = w.rpc.rpc_sync(each.worker, scale, (w.lib, each.key, y)) + x
            autograd(w.lib).backward(context_id, [y.sum()], exact=exact)

            def loss_of(x: Tensor, *leaves: Tensor) -> Tensor:
                y = x
                for each in leaves * 3:
                    y = y * each + x
                return y.sum()

            check(w, context_id, loss_of, x, *targets)


def calls_in_flight(w: Worker) -> None:
    """Some that haven't been answered yet are none of its business; they are of the next pass's."""
    x, theirs, key = leaf(1, 3), plant(w, w.next, 2, 3), f"late {w.name}"
    with autograd(w.lib).context() as context_id:
        late = w.rpc.rpc_async(w.next, pass_gate, (w.lib, key, x))
        wait_until(lambda: w.rpc.rpc_sync(w.next, visits, (w.lib, f"at gate {key}")) == 1, "at the gate")
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()], exact=True, retain_graph=True)
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)
        w.rpc.rpc_sync(w.next, open_gate, (w.lib, key))
        autograd(w.lib).backward(context_id, [(late.wait() * y).sum()], exact=True)
        check(w, context_id, lambda x, p: (x * p).sum() + (x * x * p).sum(), x, theirs)


def exact_passes_of_rrefs(w: Worker) -> None:
    """The owner of the root is where it starts, wherever the unused parts are."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.after_next, torch.mul, (x, 2))
        w.rpc.rpc_sync(w.next, backward_exactly, (w.lib, context_id, theirs.key, x))
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def backward_exactly(lib: str, context_id: int, key: str, x: Tensor) -> None:
    autograd(lib).backward(context_id, [scale(lib, key, x).sum()], exact=True)


def gradients_of_roots(w: Worker) -> None:
    """For roots that are no scalars; None stands for a scalar's 1."""
    x, theirs = leaf(1, 2, 3), plant(w, w.next, 2, 2, 3)
    g, h = quarters(5, 2, 3), quarters(6, 2, 3)
    for exact in [False, True]:
        with autograd(w.lib).context() as context_id:
            y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
            autograd(w.lib).backward(context_id, [y], retain_graph=True, gradients=[g], exact=exact)
            check(w, context_id, lambda x, p: (x * p * g).sum(), x, theirs)
            autograd(w.lib).backward(
                context_id, [y * y, y.sum(), y.mean()], gradients=[h, None, torch.tensor(12.0).double()]
            )
            check(
                w,
                context_id,
                lambda x, p: (x * p * g).sum() + (x * x * p * p * h).sum() + 3 * (x * p).sum(),
                x,
                theirs,
            )


def gradients_that_do_not_fit(w: Worker) -> None:
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 2))
        wrong = [[], [None], [quarters(1, 3), None], [quarters(1, 2)]]
        for gradients in wrong:
            with pytest.raises((RuntimeError, ValueError)):
                autograd(w.lib).backward(context_id, [y], gradients=gradients)
        with pytest.raises(TypeError):
            autograd(w.lib).backward(context_id, [y], gradients=["text"])
        autograd(w.lib).backward(context_id, [y], gradients=[quarters(1, 3)])
        check(w, context_id, lambda x: (x * 2 * quarters(1, 3)).sum(), x)


def unused_results_make_it_wait(w: Worker) -> None:
    """Fast counting: for as long as a call may take, then an error says what would help. Nothing is stuck."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    for waste in [give, pass_on]:
        args = (x,) if waste is give else (w.lib, w.after_next, give, x)
        with autograd(w.lib).context() as context_id:
            w.rpc.rpc_sync(w.next, waste, args)
            y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
            with (
                takes(at_least_secs=WAIT_SECS, at_most_secs=10),
                pytest.raises(RuntimeError, match="exact=True"),
            ):
                autograd(w.lib).backward(context_id, [y], retain_graph=True)
            for worker in everyone(w):
                wait_until(
                    lambda worker=worker, to=context_id: not w.rpc.rpc_sync(worker, is_busy, (w.lib, to)),
                    "nobody's part of the pass goes on",
                )
            autograd(w.lib).backward(context_id, [y], exact=True)
    with autograd(w.lib).context() as context_id:
        autograd(w.lib).backward(context_id, [w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()])
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def is_busy(lib: str, context_id: int) -> bool:
    """Whether a pass runs here: of any context, for only the number is told."""
    return debug_counts(lib)[1] > 0


WEFT_ONLY = [
    unused_results,
    unused_arguments,
    unused_branches,
    one_loss_after_another,
    fast_and_exact_agree,
    calls_in_flight,
    exact_passes_of_rrefs,
    gradients_of_roots,
    gradients_that_do_not_fit,
]
SHORT_TIMEOUT = [unused_results_make_it_wait]
