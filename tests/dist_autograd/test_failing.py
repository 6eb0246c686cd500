"""Errors in a pass: who is named, what the root sees, and that everyone is free afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dist_autograd.leaves import (
    autograd,
    check,
    debug_counts,
    everyone,
    leaf,
    pass_on,
    plant,
    scale,
    shift,
    slow_down,
    wait_released,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import OwnError, give, keep, kept, me, open_gate, visits
from tests.rpc.workers import Worker, shown, takes, wait_until, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


class Failing(torch.autograd.Function):
    """Its backward fails for as long as its worker says so."""

    @staticmethod
    def forward(ctx: Any, lib: str, key: str, x: Tensor) -> Tensor:
        ctx.lib, ctx.key = lib, key
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        error = kept(ctx.lib, ctx.key)
        if error is not None:
            raise_for_the_test(error)
        return None, None, gradients[0] * 2


def raise_for_the_test(error: BaseException) -> None:
    raise error


def fail_in_backward(lib: str, key: str, error: BaseException | None, x: Tensor) -> Tensor:
    keep(lib, key, error)
    return Failing.apply(lib, key, x)  # type: ignore[return-value]


def rank_of(worker: str) -> int:
    return int(worker.removeprefix("worker"))


def wait_idle(w: Worker) -> None:
    """No worker has a part of a pass left."""
    for worker in everyone(w):
        wait_until(
            lambda worker=worker: w.rpc.rpc_sync(worker, debug_counts, (w.lib,))[1] == 0, f"{worker} is idle"
        )


@weft_only
@EVERYDAY
def test_the_root_hears_which_worker_failed(worker: Worker) -> None:
    """Here, there, and where only a nested call came: the root hears which worker it was, and the text."""
    x, key = leaf(1, 3), f"failing {worker.name}"
    args = worker.lib, key, ValueError("meant to fail")
    for at, to, function, arguments in [
        (worker.next, worker.next, fail_in_backward, (*args, x)),
        (
            worker.after_next,
            worker.next,
            pass_on,
            (worker.lib, worker.after_next, fail_in_backward, *args, x),
        ),
        (worker.name, worker.next, pass_on, (worker.lib, worker.name, fail_in_backward, *args, x)),
        (worker.name, worker.name, fail_in_backward, (*args, x)),
    ]:
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(to, function, arguments)
            wanted = f"Error on Node {rank_of(at)}: .*meant to fail"
            with takes(at_most_secs=10), pytest.raises(RuntimeError, match=wanted):
                autograd(worker.lib).backward(context_id, [y.sum()])
        wait_released(worker, context_id)


def test_the_root_fails(worker: Worker) -> None:
    """An error in the root's own part, with others that wait for it."""
    x, theirs, key = leaf(1, 3), plant(worker, worker.next, 2, 3), f"failing {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        z = fail_in_backward(worker.lib, key, ValueError("at home"), y)
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="at home"):
            autograd(worker.lib).backward(context_id, [z.sum()])
    wait_released(worker, context_id)


def test_a_later_pass_works(worker: Worker) -> None:
    """Of the same context, when what was wrong has been put right."""
    x, theirs, key = leaf(1, 3), plant(worker, worker.after_next, 2, 3), f"failing {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.after_next, scale, (worker.lib, theirs.key, x))
        z = worker.rpc.rpc_sync(
            worker.next, fail_in_backward, (worker.lib, key, ValueError("not yet"), y)
        ).sum()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not yet"):
                autograd(worker.lib).backward(context_id, [z], retain_graph=True)
        worker.rpc.rpc_sync(worker.next, keep, (worker.lib, key, None))
        autograd(worker.lib).backward(context_id, [z], retain_graph=True)
        check(worker, context_id, lambda x, p: (x * p * 2).sum(), x, theirs)
        autograd(worker.lib).backward(context_id, [z])
        check(worker, context_id, lambda x, p: 2 * (x * p * 2).sum(), x, theirs)


@weft_only
def test_a_hook_fails(worker: Worker) -> None:
    """A hook on another worker that raises."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    worker.rpc.rpc_sync(worker.next, hook_to_fail, (worker.lib, theirs.key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match=r"Error on Node \d+: .*from a hook"):
            autograd(worker.lib).backward(context_id, [y.sum()])


def hook_to_fail(lib: str, key: str) -> None:
    kept(lib, key).register_hook(lambda gradient: raise_for_the_test(KeyError("from a hook")))


def test_what_was_changed_in_place_is_told(worker: Worker) -> None:
    """torch's own check of what an operator had saved, on the worker that has it."""
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, spoil, (x,))
        wanted = f"Error on Node {worker.next_rank}: .*modified by an inplace operation"
        with pytest.raises(RuntimeError, match=wanted):
            autograd(worker.lib).backward(context_id, [y.sum()])


def spoil(x: Tensor) -> Tensor:
    y = x * 1
    z = y * y
    y.add_(1)
    return z


def test_other_contexts_go_on(worker: Worker) -> None:
    """An error in one context is none of another's, on the same workers at the same time."""
    key = f"failing {worker.name}"
    theirs = plant(worker, worker.next, 2, 3)
    futures = [
        worker.rpc.rpc_async(worker.next, one_pass, (worker.lib, theirs.key, key, i % 2 == 0))
        for i in range(10)
    ]
    assert [future.wait() for future in futures] == ["failed", "right"] * 5
    wait_idle(worker)


def one_pass(lib: str, key: str, its_error: str, fails: bool) -> str:
    """A context of this worker's own over a leaf that is here."""
    rpc, x = import_module(lib), leaf(1, 3)
    here = me(lib)
    with autograd(lib).context() as context_id:
        y = rpc.rpc_sync(here, scale, (lib, key, x))
        if fails:
            y = rpc.rpc_sync(here, fail_in_backward, (lib, its_error, ValueError("meant"), y))
        try:
            autograd(lib).backward(context_id, [y.sum()])
        except RuntimeError as error:
            return "failed" if "meant" in str(error) else str(error)
        gradient = autograd(lib).get_gradients(context_id)[x]
        return "right" if torch.equal(gradient, kept(lib, key).detach()) else f"wrong: {gradient}"


@weft_only
def test_nobody_is_left_waiting(worker: Worker) -> None:
    """Every other part of the pass is ended: those before the error and those that wait behind it."""
    x, key = leaf(1, 3), f"failing {worker.name}"
    targets = [plant(worker, to, 2, 3, name="behind") for to in everyone(worker)]
    with autograd(worker.lib).context() as context_id:
        y = x
        for each in targets:
            y = worker.rpc.rpc_sync(each.worker, shift, (worker.lib, each.key, y))
        y = worker.rpc.rpc_sync(
            worker.next, fail_in_backward, (worker.lib, key, ValueError("in the middle"), y)
        )
        for each in targets:
            y = worker.rpc.rpc_sync(each.worker, shift, (worker.lib, each.key, y))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="in the middle"):
            autograd(worker.lib).backward(context_id, [y.sum()])
        wait_idle(worker)
    wait_released(worker, context_id)


@weft_only
@EVERYDAY
def test_the_original_is_the_cause(worker: Worker) -> None:
    """With its type, its attributes and the other worker's traceback; at the root it is a RuntimeError."""
    x, key = leaf(1, 3), f"failing {worker.name}"
    for to, via in [(worker.next, None), (worker.after_next, worker.next), (worker.name, None)]:
        args: tuple[Any, ...] = (worker.lib, key, OwnError("what", 3), x)
        with autograd(worker.lib).context() as context_id:
            if via is None:
                y = worker.rpc.rpc_sync(to, fail_in_backward, args)
            else:
                y = worker.rpc.rpc_sync(via, pass_on, (worker.lib, to, fail_in_backward, *args))
            with pytest.raises(RuntimeError, match=f"Error on Node {rank_of(to)}: ") as caught:
                autograd(worker.lib).backward(context_id, [y.sum()])
        cause = caught.value.__cause__
        assert isinstance(cause, OwnError), cause
        assert cause.args == OwnError("what", 3).args
        assert str(cause) in str(caught.value)
        assert "raise_for_the_test" in shown(caught.value)


@weft_only
def test_a_plain_backward_says_what_to_use(worker: Worker) -> None:
    """loss.backward() through what came from another worker is refused, in a context and after it."""
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2))
        with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
            (y * x).sum().backward()
        x.grad = None
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x: (x * 2).sum(), x)
    with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
        y.sum().backward()
    assert x.grad is None


@weft_only
def test_reentrant_checkpoints_are_refused(worker: Worker) -> None:
    """Here and there, with words about what works; nobody waits."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale_reentrantly, (worker.lib, theirs.key, x))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="use_reentrant"):
            autograd(worker.lib).backward(context_id, [y.sum()])
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        z: Any = checkpoint(torch.mul, y, y, use_reentrant=True)
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="use_reentrant"):
            autograd(worker.lib).backward(context_id, [z.sum()])
    wait_idle(worker)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [worker.rpc.rpc_sync(worker.next, give, (x,)).sum()])
        check(worker, context_id, lambda x: x.sum(), x)


def scale_reentrantly(lib: str, key: str, x: Tensor) -> Any:
    return checkpoint(scale, lib, key, x, use_reentrant=True)


@weft_only
def test_a_late_hook_fails(worker: Worker) -> None:
    """A post-accumulate hook that raises: the leaf's own .grad is what it was."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    worker.rpc.rpc_sync(worker.next, late_hook_to_fail, (worker.lib, theirs.key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        wanted = f"Error on Node {worker.next_rank}: .*from a hook"
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match=wanted):
            autograd(worker.lib).backward(context_id, [y.sum()])
        assert worker.rpc.rpc_sync(worker.next, grad_is_none, (worker.lib, theirs.key))


def late_hook_to_fail(lib: str, key: str) -> None:
    kept(lib, key).register_post_accumulate_grad_hook(
        lambda each: raise_for_the_test(KeyError("from a hook"))
    )


def grad_is_none(lib: str, key: str) -> bool:
    return kept(lib, key).grad is None


@weft_only
def test_exact_passes_fail_too(worker: Worker) -> None:
    x, key = leaf(1, 3), f"failing {worker.name}"
    with autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(worker.next, give, (x,))
        args = worker.lib, worker.after_next, fail_in_backward, worker.lib, key, ValueError("exactly"), x
        y = worker.rpc.rpc_sync(worker.next, pass_on, args).sum()
        for _ in range(2):
            with takes(at_most_secs=10), pytest.raises(RuntimeError, match=r"Error on Node \d: .*exactly"):
                autograd(worker.lib).backward(context_id, [y], exact=True, retain_graph=True)
        worker.rpc.rpc_sync(worker.after_next, keep, (worker.lib, key, None))
        autograd(worker.lib).backward(context_id, [y], exact=True)
        check(worker, context_id, lambda x: (x * 2).sum(), x)


@weft_only
def test_released_in_a_pass(worker: Worker) -> None:
    """A worker lets go of the context while its part runs: the root hears of it or is done; nobody waits."""
    x, theirs, gate = leaf(1, 3), plant(worker, worker.next, 2, 3), f"released {worker.name}"
    worker.rpc.rpc_sync(worker.next, slow_down, (worker.lib, theirs.key, gate))
    context_id = autograd(worker.lib)._new_context()._context_id()
    y = worker.rpc.rpc_sync(worker.next, pass_on, (worker.lib, worker.after_next, give, x))
    z = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, y))
    releasing = worker.rpc.rpc_async(worker.next, release_in_the_middle, (worker.lib, gate, context_id))
    with takes(at_most_secs=10), suppress_words("context"):
        autograd(worker.lib).backward(context_id, [z.sum()])
    releasing.wait()
    with suppress_words("Could not find autograd context"):
        autograd(worker.lib)._release_context(context_id)
    wait_released(worker, context_id)
    wait_idle(worker)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [worker.rpc.rpc_sync(worker.next, give, (x,)).sum()])
        check(worker, context_id, lambda x: x.sum(), x)


def release_in_the_middle(lib: str, gate: str, context_id: int) -> None:
    wait_until(lambda: visits(lib, f"at gate {gate}") == 1, "the pass is here")
    autograd(lib)._release_context(context_id)
    open_gate(lib, gate)


@contextmanager
def suppress_words(words: str) -> Generator[None]:
    """An error is fine if it says this."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
