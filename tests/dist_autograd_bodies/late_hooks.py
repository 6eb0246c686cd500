"""Hooks that torch's own never runs in a distributed pass: after accumulation, and over several tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.dist_autograd_bodies.hooks import check_noted, note, value_of
from tests.dist_autograd_bodies.sewing import (
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
from tests.rpc_bodies.places import kept
from tests.rpc_bodies.running import Worker


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


def after_accumulation(w: Worker) -> None:
    """Once a pass, with the sum of what came from every side; the leaf's own .grad is back afterwards."""
    theirs, name = plant_hooked(w, w.next, 2, "look")
    x, before = leaf(1, 3), quarters(9, 3)
    x.grad = before
    x.register_post_accumulate_grad_hook(lambda each: note(w.lib, f"home {w.name}", each.grad))  # type: ignore[arg-type]
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x))
        z = w.rpc.rpc_sync(w.after_next, torch.mul, (x, 2))
        again = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, z))
        autograd(w.lib).backward(context_id, [(x + y + again).sum()])
        p = theirs.value.detach()
        check_noted(w, w.name, f"home {w.name}", 1 + p + 2 * p)
        check_noted(w, w.next, name, 3 * x.detach())
        assert x.grad is before
        assert torch.equal(before, quarters(9, 3))
        assert torch.equal(autograd(w.lib).get_gradients(context_id)[x], 1 + 3 * p)


def the_contexts_gradient(w: Worker) -> None:
    """In a second pass what a hook sees is what the context holds by then."""
    theirs, name = plant_hooked(w, w.next, 2, "look")
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        autograd(w.lib).backward(context_id, [y], retain_graph=True)
        check_noted(w, w.next, name, x.detach(), 1)
        autograd(w.lib).backward(context_id, [y], retain_graph=True)
        check_noted(w, w.next, name, 2 * x.detach(), 2)
        check(w, context_id, lambda x, p: 2 * (x * p).sum(), x, theirs)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        autograd(w.lib).backward(context_id, [y])
        check_noted(w, w.next, name, x.detach(), 3)


def what_they_leave(w: Worker) -> None:
    """None, a changed one, another one: the context holds what is in .grad after the hook."""
    x = leaf(1, 3)
    left: dict[str, Any] = {"step": None, "change": 2 * x.detach(), "replace": quarters(77, 3)}
    for to in [w.next, w.name]:
        for act, expected in left.items():
            theirs, name = plant_hooked(w, to, 2, act)
            with autograd(w.lib).context() as context_id:
                y = w.rpc.rpc_sync(to, scale, (w.lib, theirs.key, x))
                autograd(w.lib).backward(context_id, [y.sum()])
                check_noted(w, to, name, x.detach())
                mine, found = gather(w, context_id, x, theirs)
                assert same(found, expected), f"{act}: {found}, not {expected}"
                assert same(mine, theirs.value.detach())


def the_optimizer_in_the_backward(w: Worker) -> None:
    """Three passes that each step the parameters of two workers from within, as one worker would."""
    x = leaf(1, 3)
    targets = [plant_hooked(w, to, 2 + i, "step")[0] for i, to in enumerate([w.next, w.after_next])]
    locals_ = [each.value.detach().clone().requires_grad_() for each in targets]
    for each in locals_:
        each.register_post_accumulate_grad_hook(step_half)
    for _ in range(3):
        with autograd(w.lib).context() as context_id:
            y = x
            for each in targets:
                y = w.rpc.rpc_sync(each.worker, scale, (w.lib, each.key, y))
            autograd(w.lib).backward(context_id, [(y * y).sum()])
            assert gather(w, context_id, *targets) == [None, None]
        ((x.detach() * locals_[0] * locals_[1]) ** 2).sum().backward()
    found = [w.rpc.rpc_sync(each.worker, value_of, (w.lib, each.key)) for each in targets]
    assert [torch.equal(a, b.detach()) for a, b in zip(found, locals_, strict=True)] == [True, True]


def step_half(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.5 * parameter.grad  # type: ignore[operator]
    parameter.grad = None


def over_several_tensors(w: Worker) -> None:
    """One hook for two gradients of the callee, when both are there."""
    x, key = leaf(1, 3), f"multi {w.name}"
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, hook_both, (w.lib, key, x))
        autograd(w.lib).backward(context_id, [(y * 3).sum()])
        check_noted(w, w.next, key, torch.full((3,), 9.0).double())


def hook_both(lib: str, key: str, x: Tensor) -> Tensor:
    y = x * 2
    torch.autograd.graph.register_multi_grad_hook(
        [x, y],
        lambda both: note(lib, key, sum(each for each in both if each is not None)),  # type: ignore[arg-type]
    )
    return y


WEFT_ONLY = [
    after_accumulation,
    the_contexts_gradient,
    what_they_leave,
    the_optimizer_in_the_backward,
    over_several_tensors,
]
