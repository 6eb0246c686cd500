"""What torch doesn't have: exact=True, where what isn't used never makes backward wait; and gradients=."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from tests.dist_autograd.leaves import (
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
from tests.ranks import run_on
from tests.rpc.remote_functions import give, kept, open_gate, pass_gate, visits
from tests.rpc.workers import Worker, takes, wait_until, with_options

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


WAIT_SECS = 1.0  # the RPC timeout of the bodies in SHORT_TIMEOUT


@EVERYDAY
def test_unused_results(worker: Worker) -> None:
    """Of calls to every worker, of each kind, of which one is used."""
    x = leaf(1, 3)
    targets = [plant(worker, to, 2, 3, name="unused") for to in everyone(worker)]
    for used in targets:
        with autograd(worker.lib).context() as context_id:
            results = [worker.rpc.rpc_sync(each.worker, scale, (worker.lib, each.key, x)) for each in targets]
            futures = [
                worker.rpc.rpc_async(each.worker, scale, (worker.lib, each.key, x)) for each in targets
            ]
            rrefs = [worker.rpc.remote(each.worker, scale, (worker.lib, each.key, x)) for each in targets]
            fetched = [rref.to_here() for rref in rrefs]
            torch.futures.wait_all(futures)
            loss = results[targets.index(used)].sum()
            del fetched
            with takes(at_most_secs=10):
                autograd(worker.lib).backward(context_id, [loss], exact=True)
            check(worker, context_id, lambda x, p: (x * p).sum(), x, used)


def test_unused_arguments(worker: Worker) -> None:
    """The callee's result has nothing to do with one argument, or with any."""
    x, y, theirs = leaf(1, 3), leaf(2, 3), plant(worker, worker.next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        first = worker.rpc.rpc_sync(worker.next, scale_first, (worker.lib, theirs.key, x, y))
        own = worker.rpc.rpc_sync(worker.next, ignore, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [(first * own).sum()], exact=True)
        check(worker, context_id, lambda x, y, p: (x * p * p).sum(), x, y, theirs)


def scale_first(lib: str, key: str, x: Tensor, y: Tensor) -> Tensor:
    return x * kept(lib, key)


def ignore(lib: str, key: str, x: Tensor) -> Tensor:
    return kept(lib, key)


def test_unused_branches(worker: Worker) -> None:
    """A nested call whose result its caller drops; a chain of calls that ends nowhere; a local loss only."""
    x, second, third = leaf(1, 3), plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, scale_and_waste, (worker.lib, second.key, third.worker, third.key, x)
        )
        dead = y
        for to in [worker.after_next, worker.next, worker.name]:
            dead = worker.rpc.rpc_sync(to, torch.mul, (dead, 2))
        autograd(worker.lib).backward(context_id, [y.sum()], exact=True)
        check(worker, context_id, lambda x, p: (x * p).sum(), x, second)
    with autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(
            worker.next, scale_and_waste, (worker.lib, second.key, third.worker, third.key, x)
        )
        autograd(worker.lib).backward(context_id, [(x * x).sum()], exact=True)
        check(worker, context_id, lambda x: (x * x).sum(), x)


def scale_and_waste(lib: str, key: str, to: str, its_key: str, x: Tensor) -> Tensor:
    y = scale(lib, key, x)
    import_module(lib).rpc_sync(to, scale, (lib, its_key, y))
    return y


def test_one_loss_after_another(worker: Worker) -> None:
    """Each pass of a context takes the part of the graph that its loss needs; fast when that is all of it."""
    x, second, third = leaf(1, 3), plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, second.key, x))
        z = worker.rpc.rpc_sync(worker.after_next, scale, (worker.lib, third.key, y))
        autograd(worker.lib).backward(context_id, [y.sum()], retain_graph=True, exact=True)
        check(worker, context_id, lambda x, p: (x * p).sum(), x, second)
        autograd(worker.lib).backward(context_id, [z.sum()], retain_graph=True, exact=True)
        check(worker, context_id, lambda x, p, q: (x * p).sum() + (x * p * q).sum(), x, second, third)
        autograd(worker.lib).backward(context_id, [(y * z).sum()], retain_graph=True)
        autograd(worker.lib).backward(context_id, [z.sum()], exact=True)
        check(
            worker,
            context_id,
            lambda x, p, q: (x * p).sum() + 2 * (x * p * q).sum() + (x * p * x * p * q).sum(),
            x,
            second,
            third,
        )


def test_fast_and_exact_agree(worker: Worker) -> None:
    """Where everything is used."""
    x = leaf(1, 3)
    targets = [plant(worker, to, 2, 3, name="agree") for to in everyone(worker)]
    for exact in [False, True]:
        with autograd(worker.lib).context() as context_id:
            y = x
            for each in targets * 3:
                y = worker.rpc.rpc_sync(each.worker, scale, (worker.lib, each.key, y)) + x
            autograd(worker.lib).backward(context_id, [y.sum()], exact=exact)

            def loss_of(x: Tensor, *leaves: Tensor) -> Tensor:
                y = x
                for each in leaves * 3:
                    y = y * each + x
                return y.sum()

            check(worker, context_id, loss_of, x, *targets)


def test_calls_in_flight(worker: Worker) -> None:
    """Some that haven't been answered yet are none of its business; they are of the next pass's."""
    x, theirs, key = leaf(1, 3), plant(worker, worker.next, 2, 3), f"late {worker.name}"
    with autograd(worker.lib).context() as context_id:
        late = worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, key, x))
        wait_until(
            lambda: worker.rpc.rpc_sync(worker.next, visits, (worker.lib, f"at gate {key}")) == 1,
            "at the gate",
        )
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()], exact=True, retain_graph=True)
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)
        worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
        autograd(worker.lib).backward(context_id, [(late.wait() * y).sum()], exact=True)
        check(worker, context_id, lambda x, p: (x * p).sum() + (x * x * p).sum(), x, theirs)


def test_exact_passes_of_rrefs(worker: Worker) -> None:
    """The owner of the root is where it starts, wherever the unused parts are."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(worker.after_next, torch.mul, (x, 2))
        worker.rpc.rpc_sync(worker.next, backward_exactly, (worker.lib, context_id, theirs.key, x))
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


def backward_exactly(lib: str, context_id: int, key: str, x: Tensor) -> None:
    autograd(lib).backward(context_id, [scale(lib, key, x).sum()], exact=True)


def test_gradients_of_roots(worker: Worker) -> None:
    """For roots that are no scalars; None stands for a scalar's 1."""
    x, theirs = leaf(1, 2, 3), plant(worker, worker.next, 2, 2, 3)
    g, h = quarters(5, 2, 3), quarters(6, 2, 3)
    for exact in [False, True]:
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
            autograd(worker.lib).backward(context_id, [y], retain_graph=True, gradients=[g], exact=exact)
            check(worker, context_id, lambda x, p: (x * p * g).sum(), x, theirs)
            autograd(worker.lib).backward(
                context_id, [y * y, y.sum(), y.mean()], gradients=[h, None, torch.tensor(12.0).double()]
            )
            check(
                worker,
                context_id,
                lambda x, p: (x * p * g).sum() + (x * x * p * p * h).sum() + 3 * (x * p).sum(),
                x,
                theirs,
            )


def test_gradients_that_do_not_fit(worker: Worker) -> None:
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2))
        wrong = [[], [None], [quarters(1, 3), None], [quarters(1, 2)]]
        for gradients in wrong:
            with pytest.raises((RuntimeError, ValueError)):
                autograd(worker.lib).backward(context_id, [y], gradients=gradients)
        with pytest.raises(TypeError):
            autograd(worker.lib).backward(context_id, [y], gradients=["text"])
        autograd(worker.lib).backward(context_id, [y], gradients=[quarters(1, 3)])
        check(worker, context_id, lambda x: (x * 2 * quarters(1, 3)).sum(), x)


@with_options(rpc_timeout=WAIT_SECS)
def test_unused_results_make_fast_counting_wait(worker: Worker) -> None:
    """Fast counting: for as long as a call may take, then an error says what would help. Nothing is stuck."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    for waste in [give, pass_on]:
        args = (x,) if waste is give else (worker.lib, worker.after_next, give, x)
        with autograd(worker.lib).context() as context_id:
            worker.rpc.rpc_sync(worker.next, waste, args)
            y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
            with (
                takes(at_least_secs=WAIT_SECS, at_most_secs=10),
                pytest.raises(RuntimeError, match="exact=True"),
            ):
                autograd(worker.lib).backward(context_id, [y], retain_graph=True)
            for to in everyone(worker):
                wait_until(
                    lambda to=to, context_id=context_id: (
                        not worker.rpc.rpc_sync(to, is_busy, (worker.lib, context_id))
                    ),
                    "nobody's part of the pass goes on",
                )
            autograd(worker.lib).backward(context_id, [y], exact=True)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(
            context_id, [worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()]
        )
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


def is_busy(lib: str, context_id: int) -> bool:
    """Whether a pass runs here: of any context, for only the number is told."""
    return debug_counts(lib)[1] > 0
