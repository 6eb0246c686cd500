"""Hooks of every kind: they run once a pass, on the worker they were put on, with the whole gradient."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dist_autograd.leaves import (
    Planted,
    autograd,
    check,
    gather,
    leaf,
    plant,
    quarters,
    same,
    scale,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import count, keep, kept, me, visits
from tests.rpc.workers import Worker, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


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


@EVERYDAY
def test_hooks_on_leaves(worker: Worker) -> None:
    """Whose gradient comes in parts from several workers: it is one when the hook sees it."""
    x, theirs, third = leaf(1, 3), plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    keys = [f"mine {worker.name}", f"theirs {worker.name}"]
    x.register_hook(lambda gradient: note(worker.lib, keys[0], gradient))
    worker.rpc.rpc_sync(worker.next, hook_leaf, (worker.lib, theirs.key, keys[1]))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        z = worker.rpc.rpc_sync(worker.after_next, scale, (worker.lib, third.key, x))
        again = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, z))
        autograd(worker.lib).backward(context_id, [(x * 2 + y + z + again).sum()])
        check(worker, context_id, lambda x, p, q: (x * 2 + x * p + x * q + x * q * p).sum(), x, theirs, third)
        p, q = theirs.value.detach(), third.value.detach()
        check_noted(worker, worker.name, keys[0], 2 + p + q + q * p)
        check_noted(worker, worker.next, keys[1], x.detach() * (1 + q))


def hook_leaf(lib: str, key: str, name: str) -> None:
    kept(lib, key).register_hook(lambda gradient: note(lib, name, gradient))


def test_hooks_on_results_and_arguments(worker: Worker) -> None:
    """On what was sent, what was received, and what lies between, at both ends."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    keys = [f"{what} {worker.name}" for what in ("sent", "came back", "received", "made")]
    with autograd(worker.lib).context() as context_id:
        sent = x * 2
        sent.register_hook(lambda gradient: note(worker.lib, keys[0], gradient))
        back = worker.rpc.rpc_sync(
            worker.next, hook_and_scale, (worker.lib, theirs.key, keys[2], keys[3], sent)
        )
        back.register_hook(lambda gradient: note(worker.lib, keys[1], gradient))
        autograd(worker.lib).backward(context_id, [(back * 3 + back * sent).sum()])
        check(worker, context_id, lambda x, p: ((x * 4 * p) * (3 + x * 2)).sum(), x, theirs)
        s, p = sent.detach(), theirs.value.detach()
        check_noted(worker, worker.name, keys[0], 2 * p * (3 + s) + 2 * p * s)
        check_noted(worker, worker.name, keys[1], 3 + s)
        check_noted(worker, worker.next, keys[2], 2 * p * (3 + s))
        check_noted(worker, worker.next, keys[3], 3 + s)


def hook_and_scale(lib: str, key: str, received: str, made: str, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: note(lib, received, gradient))
    y = x * kept(lib, key) + x * kept(lib, key)
    y.register_hook(lambda gradient: note(lib, made, gradient))
    return y


def test_hooks_on_what_is_passed_on(worker: Worker) -> None:
    """Received, and sent on to two workers: the hook in between sees the sum of what comes back."""
    x, third, home = leaf(1, 3), plant(worker, worker.after_next, 3, 3), plant(worker, worker.name, 4, 3)
    key = f"passed on {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, spread, (worker.lib, key, x, [(third.worker, third.key), (home.worker, home.key)])
        )
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, q, h: (x * q + x * h).sum(), x, third, home)
        check_noted(worker, worker.next, key, third.value.detach() + home.value.detach())


def spread(lib: str, key: str, x: Tensor, targets: list[tuple[str, str]]) -> Tensor:
    x.register_hook(lambda gradient: note(lib, key, gradient))
    rpc = import_module(lib)
    futures = [rpc.rpc_async(to, scale, (lib, its_key, x)) for to, its_key in targets]
    return futures[0].wait() + futures[1].wait()


def test_hooks_that_change_gradients(worker: Worker) -> None:
    """What a hook returns is what goes on, over the border too."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    x.register_hook(lambda gradient: gradient * 5)
    worker.rpc.rpc_sync(worker.next, hook_to_double, (worker.lib, theirs.key))
    with autograd(worker.lib).context() as context_id:
        sent = x * 1
        sent.register_hook(lambda gradient: gradient + 1)
        back = worker.rpc.rpc_sync(worker.next, triple_gradient, (worker.lib, theirs.key, sent))
        back.register_hook(lambda gradient: gradient * 7)
        autograd(worker.lib).backward(context_id, [back.sum()])
        gradients = autograd(worker.lib).get_gradients(context_id)
        assert torch.equal(gradients[x], (theirs.value.detach() * 7 * 3 + 1) * 5)
        assert worker.rpc.rpc_sync(
            worker.next, gradient_of, (worker.lib, context_id, theirs.key)
        ).tolist() == ((x.detach() * 7 * 2).tolist())


def hook_to_double(lib: str, key: str) -> None:
    kept(lib, key).register_hook(lambda gradient: gradient * 2)


def triple_gradient(lib: str, key: str, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x * kept(lib, key)


def gradient_of(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key)]


def test_hooks_run_once_a_pass(worker: Worker) -> None:
    """A second pass runs each hook a second time."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    key = f"twice {worker.name}"
    worker.rpc.rpc_sync(worker.next, hook_leaf, (worker.lib, theirs.key, key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        for times in [1, 2, 3]:
            autograd(worker.lib).backward(context_id, [y * times], retain_graph=True)
            check_noted(worker, worker.next, key, x.detach() * times, times)


def test_retained_gradients(worker: Worker) -> None:
    """retain_grad of received and of made tensors, at both ends; not of others."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    key = f"retained {worker.name}"
    with autograd(worker.lib).context() as context_id:
        back = worker.rpc.rpc_sync(worker.next, retain_and_scale, (worker.lib, theirs.key, key, x))
        back.retain_grad()
        autograd(worker.lib).backward(context_id, [(back * 3).sum()])
        assert torch.equal(back.grad, torch.full((3,), 3.0).double())
        received, made = worker.rpc.rpc_sync(worker.next, grads_of_kept, (worker.lib, key))
        assert torch.equal(received, theirs.value.detach() * 3)
        assert torch.equal(made, torch.full((3,), 3.0).double())
        check(worker, context_id, lambda x, p: (x * p * 3).sum(), x, theirs)


def retain_and_scale(lib: str, key: str, name: str, x: Tensor) -> Tensor:
    y = x * kept(lib, key)
    x.retain_grad()
    y.retain_grad()
    keep(lib, name, [x, y])
    return y * 1


def grads_of_kept(lib: str, name: str) -> list[Tensor]:
    return [each.grad for each in kept(lib, name)]


def test_hooks_of_modules_and_nodes(worker: Worker) -> None:
    """A module's backward hook, and a node's."""
    x, key = leaf(1, 3), f"module {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, run_module, (worker.lib, key, x))
        autograd(worker.lib).backward(context_id, [(y * y).sum()])
        check(worker, context_id, lambda x: (x * 2 * x * 2).sum(), x)
        for what in ["module", "node"]:
            number, _ = worker.rpc.rpc_sync(worker.next, noted, (worker.lib, f"{what} {key}"))
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


def test_functions_of_the_users(worker: Worker) -> None:
    """An autograd.Function runs its backward where its forward ran."""
    x, key = leaf(1, 3), f"square {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, square, (worker.lib, key, x))
        z = square(worker.lib, key, worker.rpc.rpc_sync(worker.after_next, square, (worker.lib, key, y)))
        autograd(worker.lib).backward(context_id, [z.sum()])
        check(worker, context_id, lambda x: ((x**4) ** 2).sum(), x)
        x4 = x.detach() ** 4
        check_noted(worker, worker.name, key, torch.ones(3).double())
        check_noted(worker, worker.after_next, key, 2 * x4)
        check_noted(worker, worker.next, key, 2 * x4 * 2 * x.detach() ** 2)


def test_checkpointed(worker: Worker) -> None:
    """Without reentrance: here around what came, and there; the second forward runs there too."""
    x, theirs, key = leaf(1, 3), plant(worker, worker.next, 2, 3), f"scale leaf 2 of {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale_checkpointed, (worker.lib, theirs.key, x))
        z: Any = checkpoint(torch.mul, y, y, use_reentrant=False)
        autograd(worker.lib).backward(context_id, [z.sum()])
        check(worker, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)
    assert worker.rpc.rpc_sync(worker.next, visits, (worker.lib, key)) == 2


def scale_checkpointed(lib: str, key: str, x: Tensor) -> Any:
    return checkpoint(scale, lib, key, x, use_reentrant=False)


def test_saved_tensors_hooks(worker: Worker) -> None:
    """saved_tensors_hooks of the callee."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale_packed, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [(y * y).sum()])
        check(worker, context_id, lambda x, p: (x * p * x * p).sum(), x, theirs)


def scale_packed(lib: str, key: str, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.tolist(), lambda t: torch.tensor(t).double()):
        return x * kept(lib, key)


def test_calls_in_hooks(worker: Worker) -> None:
    """A hook may call: the worker is its own, and so is the answer."""
    x, theirs, third = leaf(1, 3), plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    worker.rpc.rpc_sync(worker.next, hook_to_call, (worker.lib, theirs.key, third.worker, third.key))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()])
        mine, found = gather(worker, context_id, x, theirs)
        assert same(mine, theirs.value.detach())
        assert same(found, x.detach() * third.value.detach())


def hook_to_call(lib: str, key: str, to: str, its_key: str) -> None:
    kept(lib, key).register_hook(
        lambda gradient: gradient * import_module(lib).rpc_sync(to, value_of, (lib, its_key))
    )


def value_of(lib: str, key: str) -> Tensor:
    return kept(lib, key).detach()


# Hooks that torch's own never runs in a distributed pass: after accumulation, and over several tensors


def hook_late(lib: str, key: str, name: str, act: str) -> None:
    """Note what .grad is when the hook runs; then do something with it."""
    parameter = kept(lib, key)
    parameter.register_post_accumulate_grad_hook(lambda each: run_late(lib, name, act, each))


def run_late(lib: str, name: str, act: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    note(lib, name, parameter.grad)
    if act == "step":
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None
    elif act == "change":
        parameter.grad.mul_(2)
    elif act == "replace":
        parameter.grad = quarters(77, *parameter.shape)


def plant_hooked(w: Worker, to: str, seed: int, act: str) -> tuple[Planted, str]:
    planted = plant(w, to, seed, 3, name=act)
    name = f"{act} {w.name} {to}"
    w.rpc.rpc_sync(to, hook_late, (w.lib, planted.key, name, act))
    return planted, name


@weft_only
@EVERYDAY
def test_hooks_after_accumulation(worker: Worker) -> None:
    """Once a pass, with the sum of what came from every side; the leaf's own .grad is back afterwards."""
    theirs, name = plant_hooked(worker, worker.next, 2, "look")
    x, before = leaf(1, 3), quarters(9, 3)
    x.grad = before
    x.register_post_accumulate_grad_hook(lambda each: note(worker.lib, f"home {worker.name}", each.grad))  # type: ignore[arg-type]
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        z = worker.rpc.rpc_sync(worker.after_next, torch.mul, (x, 2))
        again = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, z))
        autograd(worker.lib).backward(context_id, [(x + y + again).sum()])
        p = theirs.value.detach()
        check_noted(worker, worker.name, f"home {worker.name}", 1 + p + 2 * p)
        check_noted(worker, worker.next, name, 3 * x.detach())
        assert x.grad is before
        assert torch.equal(before, quarters(9, 3))
        assert torch.equal(autograd(worker.lib).get_gradients(context_id)[x], 1 + 3 * p)


@weft_only
def test_a_late_hook_sees_the_contexts_gradient(worker: Worker) -> None:
    """In a second pass what a hook sees is what the context holds by then."""
    theirs, name = plant_hooked(worker, worker.next, 2, "look")
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        autograd(worker.lib).backward(context_id, [y], retain_graph=True)
        check_noted(worker, worker.next, name, x.detach(), 1)
        autograd(worker.lib).backward(context_id, [y], retain_graph=True)
        check_noted(worker, worker.next, name, 2 * x.detach(), 2)
        check(worker, context_id, lambda x, p: 2 * (x * p).sum(), x, theirs)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        autograd(worker.lib).backward(context_id, [y])
        check_noted(worker, worker.next, name, x.detach(), 3)


@weft_only
def test_what_late_hooks_leave(worker: Worker) -> None:
    """None, a changed one, another one: the context holds what is in .grad after the hook."""
    x = leaf(1, 3)
    left: dict[str, Any] = {"step": None, "change": 2 * x.detach(), "replace": quarters(77, 3)}
    for to in [worker.next, worker.name]:
        for act, expected in left.items():
            theirs, name = plant_hooked(worker, to, 2, act)
            with autograd(worker.lib).context() as context_id:
                y = worker.rpc.rpc_sync(to, scale, (worker.lib, theirs.key, x))
                autograd(worker.lib).backward(context_id, [y.sum()])
                check_noted(worker, to, name, x.detach())
                mine, found = gather(worker, context_id, x, theirs)
                assert same(found, expected), f"{act}: {found}, not {expected}"
                assert same(mine, theirs.value.detach())


@weft_only
def test_the_optimizer_in_the_backward(worker: Worker) -> None:
    """Three passes that each step the parameters of two workers from within, as one worker would."""
    x = leaf(1, 3)
    targets = [
        plant_hooked(worker, to, 2 + i, "step")[0] for i, to in enumerate([worker.next, worker.after_next])
    ]
    locals_ = [each.value.detach().clone().requires_grad_() for each in targets]
    for each in locals_:
        each.register_post_accumulate_grad_hook(step_half)
    for _ in range(3):
        with autograd(worker.lib).context() as context_id:
            y = x
            for each in targets:
                y = worker.rpc.rpc_sync(each.worker, scale, (worker.lib, each.key, y))
            autograd(worker.lib).backward(context_id, [(y * y).sum()])
            assert gather(worker, context_id, *targets) == [None, None]
        ((x.detach() * locals_[0] * locals_[1]) ** 2).sum().backward()
    found = [worker.rpc.rpc_sync(each.worker, value_of, (worker.lib, each.key)) for each in targets]
    assert [torch.equal(a, b.detach()) for a, b in zip(found, locals_, strict=True)] == [True, True]


def step_half(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.5 * parameter.grad  # type: ignore[operator]
    parameter.grad = None


@weft_only
def test_a_hook_over_several_tensors(worker: Worker) -> None:
    """One hook for two gradients of the callee, when both are there."""
    x, key = leaf(1, 3), f"multi {worker.name}"
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, hook_both, (worker.lib, key, x))
        autograd(worker.lib).backward(context_id, [(y * 3).sum()])
        check_noted(worker, worker.next, key, torch.full((3,), 9.0).double())


def hook_both(lib: str, key: str, x: Tensor) -> Tensor:
    y = x * 2
    torch.autograd.graph.register_multi_grad_hook(
        [x, y],
        lambda both: note(lib, key, sum(each for each in both if each is not None)),  # type: ignore[arg-type]
    )
    return y
