"""Hooks of every kind: they run once a pass, on the worker they were put on, with the whole gradient."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dist_autograd_bodies.sewing import (
    autograd,
    check,
    gather,
    leaf,
    plant,
    same,
    scale,
)
from tests.rpc_bodies.places import count, keep, kept, me, visits
from tests.rpc_bodies.running import Worker


def note(lib: str, key: str, gradient: Tensor) -> None:
    """Remember on the worker that runs this hook what it was given."""
    count(lib, f"hook {key}")
    keep(lib, f"hooked {key}", gradient.detach().clone())


def noted(lib: str, key: str) -> tuple[int, Tensor | None]:
    """How often a hook of that name ran on this worker, and the last gradient."""
    number = visits(lib, f"hook {key}")
    return number, kept(lib, f"hooked {key}") if number else None


def check_noted(w: Worker, worker: str, key: str, expected: Tensor, times: int = 1) -> None:
    number, gradient = w.rpc.rpc_sync(worker, noted, (w.lib, key))
    assert number == times, f"{key} ran {number} times on {worker}"
    assert same(gradient, expected), f"{key}: {gradient}, not {expected}"


def on_leaves(w: Worker) -> None:
    """Whose gradient comes in parts from several workers: it is one when the hook sees it."""
    x, theirs, third = leaf(1, 3), plant(w, w.next, 2, 3), plant(w, w.after_next, 3, 3)
    keys = [f"mine {w.name}", f"theirs {w.name}"]
    x.register_hook(lambda gradient: note(w.lib, keys[0], gradient))
    w.rpc.rpc_sync(w.next, hook_leaf, (w.lib, theirs.key, keys[1]))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        z = w.rpc.rpc_sync(w.after_next, scale, (w.lib, third.key, x))
        again = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, z))
        autograd(w.lib).backward(context_id, [(x * 2 + y + z + again).sum()])
        check(w, context_id, lambda x, p, q: (x * 2 + x * p + x * q + x * q * p).sum(), x, theirs, third)
        p, q = theirs.value.detach(), third.value.detach()
        check_noted(w, w.name, keys[0], 2 + p + q + q * p)
        check_noted(w, w.next, keys[1], x.detach() * (1 + q))


def hook_leaf(lib: str, key: str, name: str) -> None:
    kept(lib, key).register_hook(lambda gradient: note(lib, name, gradient))


def on_results_and_arguments(w: Worker) -> None:
    """On what was sent, what was received, and what lies between, at both ends."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    keys = [f"{what} {w.name}" for what in ("sent", "came back", "received", "made")]
    with autograd(w.lib).context() as context_id:
        sent = x * 2
        sent.register_hook(lambda gradient: note(w.lib, keys[0], gradient))
        back = w.rpc.rpc_sync(w.next, hook_and_scale, (w.lib, theirs.key, keys[2], keys[3], sent))
        back.register_hook(lambda gradient: note(w.lib, keys[1], gradient))
        autograd(w.lib).backward(context_id, [(back * 3 + back * sent).sum()])
        check(w, context_id, lambda x, p: ((x * 4 * p) * (3 + x * 2)).sum(), x, theirs)
        s, p = sent.detach(), theirs.value.detach()
        check_noted(w, w.name, keys[0], 2 * p * (3 + s) + 2 * p * s)
        check_noted(w, w.name, keys[1], 3 + s)
        check_noted(w, w.next, keys[2], 2 * p * (3 + s))
        check_noted(w, w.next, keys[3], 3 + s)


def hook_and_scale(lib: str, key: str, received: str, made: str, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: note(lib, received, gradient))
    y = x * kept(lib, key) + x * kept(lib, key)
    y.register_hook(lambda gradient: note(lib, made, gradient))
    return y


def on_what_is_passed_on(w: Worker) -> None:
    """Received, and sent on to two workers: the hook in between sees the sum of what comes back."""
    x, third, home = leaf(1, 3), plant(w, w.after_next, 3, 3), plant(w, w.name, 4, 3)
    key = f"passed on {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(
            w.next, spread, (w.lib, key, x, [(third.worker, third.key), (home.worker, home.key)])
        )
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x, q, h: (x * q + x * h).sum(), x, third, home)
        check_noted(w, w.next, key, third.value.detach() + home.value.detach())


def spread(lib: str, key: str, x: Tensor, targets: list[tuple[str, str]]) -> Tensor:
    x.register_hook(lambda gradient: note(lib, key, gradient))
    rpc = import_module(lib)
    futures = [rpc.rpc_async(to, scale, (lib, its_key, x)) for to, its_key in targets]
    return futures[0].wait() + futures[1].wait()


def that_change_gradients(w: Worker) -> None:
    """What a hook returns is what goes on, over the border too."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    x.register_hook(lambda gradient: gradient * 5)
    w.rpc.rpc_sync(w.next, hook_to_double, (w.lib, theirs.key))
    with autograd(w.lib).context() as context_id:
        sent = x * 1
        sent.register_hook(lambda gradient: gradient + 1)
        back = w.rpc.rpc_sync(w.next, triple_gradient, (w.lib, theirs.key, sent))
        back.register_hook(lambda gradient: gradient * 7)
        autograd(w.lib).backward(context_id, [back.sum()])
        gradients = autograd(w.lib).get_gradients(context_id)
        assert torch.equal(gradients[x], (theirs.value.detach() * 7 * 3 + 1) * 5)
        assert w.rpc.rpc_sync(w.next, gradient_of, (w.lib, context_id, theirs.key)).tolist() == (
            (x.detach() * 7 * 2).tolist()
        )


def hook_to_double(lib: str, key: str) -> None:
    kept(lib, key).register_hook(lambda gradient: gradient * 2)


def triple_gradient(lib: str, key: str, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x * kept(lib, key)


def gradient_of(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key)]


def once_a_pass(w: Worker) -> None:
    """A second pass runs each hook a second time."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    key = f"twice {w.name}"
    w.rpc.rpc_sync(w.next, hook_leaf, (w.lib, theirs.key, key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        for times in [1, 2, 3]:
            autograd(w.lib).backward(context_id, [y * times], retain_graph=True)
            check_noted(w, w.next, key, x.detach() * times, times)


def retained(w: Worker) -> None:
    """retain_grad of received and of made tensors, at both ends; not of others."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    key = f"retained {w.name}"
    with autograd(w.lib).context() as context_id:
        back = w.rpc.rpc_sync(w.next, retain_and_scale, (w.lib, theirs.key, key, x))
        back.retain_grad()
        autograd(w.lib).backward(context_id, [(back * 3).sum()])
        assert torch.equal(back.grad, torch.full((3,), 3.0).double())
        received, made = w.rpc.rpc_sync(w.next, grads_of_kept, (w.lib, key))
        assert torch.equal(received, theirs.value.detach() * 3)
        assert torch.equal(made, torch.full((3,), 3.0).double())
        check(w, context_id, lambda x, p: (x * p * 3).sum(), x, theirs)


def retain_and_scale(lib: str, key: str, name: str, x: Tensor) -> Tensor:
    y = x * kept(lib, key)
    x.retain_grad()
    y.retain_grad()
    keep(lib, name, [x, y])
    return y * 1


def grads_of_kept(lib: str, name: str) -> list[Tensor]:
    return [each.grad for each in kept(lib, name)]


def of_modules_and_nodes(w: Worker) -> None:
    """A module's backward hook, and a node's."""
    x, key = leaf(1, 3), f"module {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, run_module, (w.lib, key, x))
        autograd(w.lib).backward(context_id, [(y * y).sum()])
        check(w, context_id, lambda x: (x * 2 * x * 2).sum(), x)
        for what in ["module", "node"]:
            number, _ = w.rpc.rpc_sync(w.next, noted, (w.lib, f"{what} {key}"))
            assert number == 1, what


class Doubler(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def run_module(lib: str, key: str, x: Tensor) -> Tensor:
    module = Doubler()
    module.register_full_backward_hook(lambda _m, _in, out: note(lib, f"module {key}", out[0]))
    y = module(x)
    node: Any = y.grad_fn
    node.register_hook(lambda _in, out: note(lib, f"node {key}", out[0]))
    return y


class Twice(torch.autograd.Function):
    """Saves what it was given, and says in its backward on which worker that runs."""

    @staticmethod
    def forward(ctx: Any, lib: str, key: str, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.lib, ctx.key, ctx.made_by = lib, key, me(lib)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        assert me(ctx.lib) == ctx.made_by
        assert not torch.is_grad_enabled()
        note(ctx.lib, ctx.key, gradients[0])
        (x,) = ctx.saved_tensors
        return None, None, gradients[0] * 2 * x


def square(lib: str, key: str, x: Tensor) -> Tensor:
    return Twice.apply(lib, key, x)  # type: ignore[return-value]


def functions_of_the_users(w: Worker) -> None:
    """An autograd.Function runs its backward where its forward ran."""
    x, key = leaf(1, 3), f"square {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, square, (w.lib, key, x))
        z = square(w.lib, key, w.rpc.rpc_sync(w.after_next, square, (w.lib, key, y)))
        autograd(w.lib).backward(context_id, [z.sum()])
        check(w, context_id, lambda x: ((x**4) ** 2).sum(), x)
        x4 = x.detach() ** 4
        check_noted(w, w.name, key, torch.ones(3).double())
        check_noted(w, w.after_next, key, 2 * x4)
        check_noted(w, w.next, key, 2 * x4 * 2 * x.detach() ** 2)


def checkpointed(w: Worker) -> None:
    """Without reentrance: here around what came, and there; the second forward runs there too."""
    x, theirs, key = leaf(1, 3), plant(w, w.next, 2, 3), f"scale leaf 2 of {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale_checkpointed, (w.lib, theirs.key, x))
        z: Any = checkpoint(torch.mul, y, y, use_reentrant=False)
        autograd(w.lib).backward(context_id, [z.sum()])
        check(w, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)
    assert w.rpc.rpc_sync(w.next, visits, (w.lib, key)) == 2


def scale_checkpointed(lib: str, key: str, x: Tensor) -> Any:
    return checkpoint(scale, lib, key, x, use_reentrant=False)


def packed(w: Worker) -> None:
    """saved_tensors_hooks of the callee."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale_packed, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [(y * y).sum()])
        check(w, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)


def scale_packed(lib: str, key: str, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.tolist(), lambda t: torch.tensor(t).double()):
        return x * kept(lib, key)


def calls_in_hooks(w: Worker) -> None:
    """A hook may call: the worker is its own, and so is the answer."""
    x, theirs, third = leaf(1, 3), plant(w, w.next, 2, 3), plant(w, w.after_next, 3, 3)
    w.rpc.rpc_sync(w.next, hook_to_call, (w.lib, theirs.key, third.worker, third.key))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()])
        mine, found = gather(w, context_id, x, theirs)
        assert same(mine, theirs.value.detach())
        assert same(found, x.detach() * third.value.detach())


def hook_to_call(lib: str, key: str, to: str, its_key: str) -> None:
    kept(lib, key).register_hook(
        lambda gradient: gradient * import_module(lib).rpc_sync(to, value_of, (lib, its_key))
    )


def value_of(lib: str, key: str) -> Tensor:
    return kept(lib, key).detach()


BODIES = [
    on_leaves,
    on_results_and_arguments,
    on_what_is_passed_on,
    that_change_gradients,
    once_a_pass,
    retained,
    of_modules_and_nodes,
    functions_of_the_users,
    checkpointed,
    packed,
    calls_in_hooks,
]
