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

from tests.dist_autograd_bodies.passes import slow_down
from tests.dist_autograd_bodies.sewing import (
    autograd,
    check,
    debug_counts,
    everyone,
    leaf,
    pass_on,
    plant,
    scale,
    shift,
    wait_released,
)
from tests.rpc_bodies.errors import OwnError
from tests.rpc_bodies.places import give, keep, kept, me, open_gate, visits
from tests.rpc_bodies.running import Worker, shown, takes, wait_until


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


def on_each_worker(w: Worker) -> None:
    """Here, there, and where only a nested call came: the root hears which worker it was, and the text."""
    x, key = leaf(1, 3), f"failing {w.name}"
    args = w.lib, key, ValueError("meant to fail")
    for at, to, function, arguments in [
        (w.next, w.next, fail_in_backward, (*args, x)),
        (w.after_next, w.next, pass_on, (w.lib, w.after_next, fail_in_backward, *args, x)),
        (w.name, w.next, pass_on, (w.lib, w.name, fail_in_backward, *args, x)),
        (w.name, w.name, fail_in_backward, (*args, x)),
    ]:
        with autograd(w.lib).context() as context_id:
            y = w.rpc.rpc_sync(to, function, arguments)
            wanted = f"Error on Node {rank_of(at)}: .*meant to fail"
            with takes(at_most_secs=10), pytest.raises(RuntimeError, match=wanted):
                autograd(w.lib).backward(context_id, [y.sum()])
        wait_released(w, context_id)


def at_the_root(w: Worker) -> None:
    """An error in the root's own part, with others that wait for it."""
    x, theirs, key = leaf(1, 3), plant(w, w.next, 2, 3), f"failing {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        z = fail_in_backward(w.lib, key, ValueError("at home"), y)
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="at home"):
            autograd(w.lib).backward(context_id, [z.sum()])
    wait_released(w, context_id)


def a_later_pass_works(w: Worker) -> None:
    """Of the same context, when what was wrong has been put right."""
    x, theirs, key = leaf(1, 3), plant(w, w.after_next, 2, 3), f"failing {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.after_next, scale, (w.lib, theirs.key, x))
        z = w.rpc.rpc_sync(w.next, fail_in_backward, (w.lib, key, ValueError("not yet"), y)).sum()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not yet"):
                autograd(w.lib).backward(context_id, [z], retain_graph=True)
        w.rpc.rpc_sync(w.next, keep, (w.lib, key, None))
        autograd(w.lib).backward(context_id, [z], retain_graph=True)
        check(w, context_id, lambda x, p: (x * p * 2).sum(), x, theirs)
        autograd(w.lib).backward(context_id, [z])
        check(w, context_id, lambda x, p: 2 * (x * p * 2).sum(), x, theirs)


def in_hooks(w: Worker) -> None:
    """A hook on another worker that raises."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    w.rpc.rpc_sync(w.next, hook_to_fail, (w.lib, theirs.key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match=r"Error on Node \d+: .*from a hook"):
            autograd(w.lib).backward(context_id, [y.sum()])


def hook_to_fail(lib: str, key: str) -> None:
    kept(lib, key).register_hook(lambda gradient: raise_for_the_test(KeyError("from a hook")))


def what_was_changed_in_place(w: Worker) -> None:
    """torch's own check of what an operator had saved, on the worker that has it."""
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, spoil, (x,))
        wanted = f"Error on Node {w.next_rank}: .*modified by an inplace operation"
        with pytest.raises(RuntimeError, match=wanted):
            autograd(w.lib).backward(context_id, [y.sum()])


def spoil(x: Tensor) -> Tensor:
    y = x * 1
    z = y * y
    y.add_(1)
    return z


def others_go_on(w: Worker) -> None:
    """An error in one context is none of another's, on the same workers at the same time."""
    key = f"failing {w.name}"
    theirs = plant(w, w.next, 2, 3)
    futures = [w.rpc.rpc_async(w.next, one_pass, (w.lib, theirs.key, key, i % 2 == 0)) for i in range(10)]
    assert [future.wait() for future in futures] == ["failed", "right"] * 5
    wait_idle(w)


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


def nobody_is_left_waiting(w: Worker) -> None:
    """Every other part of the pass is ended: those before the error and those that wait behind it."""
    x, key = leaf(1, 3), f"failing {w.name}"
    targets = [plant(w, to, 2, 3, name="behind") for to in everyone(w)]
    with autograd(w.lib).context() as context_id:
        y = x
        for each in targets:
            y = w.rpc.rpc_sync(each.worker, shift, (w.lib, each.key, y))
        y = w.rpc.rpc_sync(w.next, fail_in_backward, (w.lib, key, ValueError("in the middle"), y))
        for each in targets:
            y = w.rpc.rpc_sync(each.worker, shift, (w.lib, each.key, y))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="in the middle"):
            autograd(w.lib).backward(context_id, [y.sum()])
        wait_idle(w)
    wait_released(w, context_id)


def the_original_is_the_cause(w: Worker) -> None:
    """With its type, its attributes and the other worker's traceback; at the root it is a RuntimeError."""
    x, key = leaf(1, 3), f"failing {w.name}"
    for to, via in [(w.next, None), (w.after_next, w.next), (w.name, None)]:
        args: tuple[Any, ...] = (w.lib, key, OwnError("what", 3), x)
        with autograd(w.lib).context() as context_id:
            if via is None:
                y = w.rpc.rpc_sync(to, fail_in_backward, args)
            else:
                y = w.rpc.rpc_sync(via, pass_on, (w.lib, to, fail_in_backward, *args))
            with pytest.raises(RuntimeError, match=f"Error on Node {rank_of(to)}: ") as caught:
                autograd(w.lib).backward(context_id, [y.sum()])
        cause = caught.value.__cause__
        assert isinstance(cause, OwnError), cause
        assert cause.args == OwnError("what", 3).args
        assert str(cause) in str(caught.value)
        assert "raise_for_the_test" in shown(caught.value)


def a_plain_backward_says_what_to_use(w: Worker) -> None:
    """loss.backward() through what came from another worker is refused, in a context and after it."""
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 2))
        with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
            (y * x).sum().backward()
        x.grad = None
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x: (x * 2).sum(), x)
    with pytest.raises(RuntimeError, match=r"dist_autograd\.backward"):
        y.sum().backward()
    assert x.grad is None


def reentrant_checkpoints_are_refused(w: Worker) -> None:
    """Here and there, with words about what works; nobody waits."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale_reentrantly, (w.lib, theirs.key, x))
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="use_reentrant"):
            autograd(w.lib).backward(context_id, [y.sum()])
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        z: Any = checkpoint(torch.mul, y, y, use_reentrant=True)
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match="use_reentrant"):
            autograd(w.lib).backward(context_id, [z.sum()])
    wait_idle(w)
    with autograd(w.lib).context() as context_id:
        autograd(w.lib).backward(context_id, [w.rpc.rpc_sync(w.next, give, (x,)).sum()])
        check(w, context_id, lambda x: x.sum(), x)


def scale_reentrantly(lib: str, key: str, x: Tensor) -> Any:
    return checkpoint(scale, lib, key, x, use_reentrant=True)


def in_late_hooks(w: Worker) -> None:
    """A post-accumulate hook that raises: the leaf's own .grad is what it was."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    w.rpc.rpc_sync(w.next, late_hook_to_fail, (w.lib, theirs.key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        wanted = f"Error on Node {w.next_rank}: .*from a hook"
        with takes(at_most_secs=10), pytest.raises(RuntimeError, match=wanted):
            autograd(w.lib).backward(context_id, [y.sum()])
        assert w.rpc.rpc_sync(w.next, grad_is_none, (w.lib, theirs.key))


def late_hook_to_fail(lib: str, key: str) -> None:
    kept(lib, key).register_post_accumulate_grad_hook(
        lambda each: raise_for_the_test(KeyError("from a hook"))
    )


def grad_is_none(lib: str, key: str) -> bool:
    return kept(lib, key).grad is None


def exact_passes_fail_too(w: Worker) -> None:
    x, key = leaf(1, 3), f"failing {w.name}"
    with autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.next, give, (x,))
        args = w.lib, w.after_next, fail_in_backward, w.lib, key, ValueError("exactly"), x
        y = w.rpc.rpc_sync(w.next, pass_on, args).sum()
        for _ in range(2):
            with takes(at_most_secs=10), pytest.raises(RuntimeError, match=r"Error on Node \d: .*exactly"):
                autograd(w.lib).backward(context_id, [y], exact=True, retain_graph=True)
        w.rpc.rpc_sync(w.after_next, keep, (w.lib, key, None))
        autograd(w.lib).backward(context_id, [y], exact=True)
        check(w, context_id, lambda x: (x * 2).sum(), x)


def released_in_a_pass(w: Worker) -> None:
    """A worker lets go of the context while its part runs: the root hears of it or is done; nobody waits."""
    x, theirs, gate = leaf(1, 3), plant(w, w.next, 2, 3), f"released {w.name}"
    w.rpc.rpc_sync(w.next, slow_down, (w.lib, theirs.key, gate))
    context_id = autograd(w.lib)._new_context()._context_id()
    y = w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, give, x))
    z = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, y))
    releasing = w.rpc.rpc_async(w.next, release_in_the_middle, (w.lib, gate, context_id))
    with takes(at_most_secs=10), suppress_words("context"):
        autograd(w.lib).backward(context_id, [z.sum()])
    releasing.wait()
    with suppress_words("Could not find autograd context"):
        autograd(w.lib)._release_context(context_id)
    wait_released(w, context_id)
    wait_idle(w)
    with autograd(w.lib).context() as context_id:
        autograd(w.lib).backward(context_id, [w.rpc.rpc_sync(w.next, give, (x,)).sum()])
        check(w, context_id, lambda x: x.sum(), x)


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


BODIES = [at_the_root, a_later_pass_works, what_was_changed_in_place, others_go_on]
# torch ends its process in the first, loses the text in the second, and leaves parts waiting in the third.
WEFT_ONLY = [
    on_each_worker,
    in_hooks,
    nobody_is_left_waiting,
    the_original_is_the_cause,
    a_plain_backward_says_what_to_use,
    reentrant_checkpoints_are_refused,
    in_late_hooks,
    exact_passes_fail_too,
    released_in_a_pass,
]
