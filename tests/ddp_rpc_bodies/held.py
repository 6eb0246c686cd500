"""Gradients that somebody holds on to keep their values, whatever the module is used for next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data_parallel.twins import assert_same_gradient
from tests.ddp_rpc_bodies.libraries import dist_autograd, on_this_library
from tests.ddp_rpc_bodies.modes import Gradients, context_gradients, copied, local_of, named_parameters
from tests.ddp_rpc_bodies.pipelines import (
    BACK,
    FRONT,
    check_context,
    every_ranks,
    make_part,
    mean_of,
    mean_square,
)
from tests.ddp_rpc_bodies.remote_parts import Moody
from tests.ddp_rpc_bodies.running import Body, Trainer
from tests.ddp_rpc_bodies.wraps import WRAPS, ddp, sharded, without_sync


def each_model(t: Trainer) -> list[tuple[str, Any]]:
    """A model of each kind, new."""
    made = [(wrap.__name__, wrap(t, make_part(BACK))) for wrap in WRAPS]
    # torch's views are the reducer's memory, in every context.
    views = ("ddp with views", ddp(t, make_part(BACK), gradient_as_bucket_view=True))
    return on_this_library(made, [views])


def for_each_model(body: Callable[[Trainer, str, Any], None]) -> Body:
    def run(t: Trainer) -> None:
        for name, model in each_model(t):
            body(t, name, model)

    run.__name__ = body.__name__
    return run


def means(t: Trainer, *steps: int) -> Gradients:
    """The mean over the trainers of the gradients of all these steps together."""
    by_step = [
        mean_of(every_ranks(make_part(BACK), t.ranks, lambda m, r, step=step: mean_square(m, r, step)))
        for step in steps
    ]
    return mean_of(by_step, divisor=1)


class Held:
    """Gradients as they are handed out, and what they were then."""

    def __init__(self, gradients: dict[Tensor, Tensor]) -> None:
        self._gradients = list(gradients.values())
        self._values = [local_of(grad).clone() for grad in self._gradients]
        assert self._gradients, "there is nothing to hold"

    def check(self, after: str) -> None:
        for grad, value in zip(self._gradients, self._values, strict=True):
            assert torch.equal(local_of(grad), value), f"a gradient was changed by {after}"


def step_in_context(t: Trainer, name: str, model: nn.Module, step: int) -> Held:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank, step)])
        check_context(context_id, model, means(t, step), f"{name}, step {step}")
        return Held(dist_autograd.get_gradients(context_id))


def an_earlier_contexts(t: Trainer, name: str, model: Any) -> None:
    """A context's gradients after it has ended, while the same module goes on."""
    warm_up(t, model)
    held = [step_in_context(t, name, model, 0)]
    for step in (1, 2):
        held.append(step_in_context(t, name, model, step))
        for one in held:
            one.check(f"a later context, with {name}")
    mean_square(model, t.rank, 3).backward()
    for one in held:
        one.check(f"loss.backward(), with {name}")
    model.zero_grad(set_to_none=False)
    for one in held:
        one.check(f"zero_grad, with {name}")
    with without_sync(model):
        mean_square(model, t.rank, 4).backward()
    held.append(step_in_context(t, name, model, 5))
    for one in held:
        one.check(f"a context after no_sync, with {name}")


def warm_up(t: Trainer, model: nn.Module) -> None:
    """After the first steps buckets, and what lies in them, stay where they are."""
    for step in range(3):
        mean_square(model, t.rank, step).backward()
        model.zero_grad(set_to_none=True)


def grads(model: nn.Module) -> Gradients:
    return {name: copied(param.grad) for name, param in named_parameters(model)}


def check_grads(model: nn.Module, right: Gradients, what: str) -> None:
    for name, grad in grads(model).items():
        assert_same_gradient(grad, right[name], f"{what}, {name}", tolerance=1e-12)


def dot_grad(t: Trainer, name: str, model: Any) -> None:
    """`.grad`, which may lie in the reducer's own memory, while the same module is used in a context."""
    warm_up(t, model)
    mean_square(model, t.rank, 0).backward()
    check_grads(model, means(t, 0), f"{name}: .grad at first")
    objects = [param.grad for param in model.parameters()]
    held = [step_in_context(t, name, model, step) for step in (1, 2)]
    assert all(param.grad is grad for param, grad in zip(model.parameters(), objects, strict=True)), name
    check_grads(model, means(t, 0), f"{name}: .grad after two contexts")
    # It goes on as if there had been no context.
    mean_square(model, t.rank, 3).backward()
    check_grads(model, means(t, 0, 3), f"{name}: .grad, accumulated")
    for one in held:
        one.check(f"loss.backward(), with {name}")


def accumulated_dot_grad(t: Trainer, name: str, model: Any) -> None:
    """What no_sync has left in `.grad` is not the context's, and is reduced by the next loss.backward()."""
    with without_sync(model):
        mean_square(model, t.rank, 0).backward()
    step_in_context(t, name, model, 1)
    mean_square(model, t.rank, 2).backward()
    check_grads(model, means(t, 0, 2), f"{name}: .grad after no_sync, a context and a sync")


def unsynced_contexts_leave_nothing(t: Trainer, name: str, model: Any) -> None:
    """What a context without sync has added up ends with it."""
    with dist_autograd.context() as context_id, without_sync(model):
        dist_autograd.backward(context_id, [mean_square(model, t.rank, 0)])
    step_in_context(t, name, model, 1)
    mean_square(model, t.rank, 2).backward()
    check_grads(model, means(t, 2), f"{name}: .grad after an unsynced context")


def local_gradients_without_sync(t: Trainer) -> None:
    """Without sync a context has this trainer's own."""
    own = every_ranks(make_part(BACK), [t.rank], mean_square)[0]
    for name, model in each_model(t):
        if name == sharded.__name__:
            continue  # its gradients are full until they are reduced, and nowhere to be seen
        with dist_autograd.context() as context_id, without_sync(model):
            dist_autograd.backward(context_id, [mean_square(model, t.rank)])
            check_context(context_id, model, own, f"{name} without sync")
        assert all(param.grad is None for param in model.parameters())


def the_users_changes_stay_the_users(t: Trainer, name: str, model: Any) -> None:
    """Somebody scales the gradients that a context has handed out; later ones don't know of it."""
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank, 0)])
        for grad in dist_autograd.get_gradients(context_id).values():
            local_of(grad).zero_()
    for step in (0, 1):
        step_in_context(t, name, model, step)
    mean_square(model, t.rank, 2).backward()
    check_grads(model, means(t, 2), f"{name}: .grad")


class MoodyModel(nn.Module):
    """Fails in the middle of backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = make_part(FRONT), make_part(BACK)
        self.mood = 1.0

    def forward(self, rows: Tensor) -> Tensor:
        return self.back(Moody.apply(torch.tanh(self.front(rows)), torch.tensor(self.mood)))


def dot_grad_after_an_error(t: Trainer) -> None:
    """A backward that fails half way, on all trainers, leaves `.grad` alone and nothing in the context."""
    for options in ({}, {"gradient_as_bucket_view": True}, None):
        bare = MoodyModel()
        model = sharded(t, bare) if options is None else ddp(t, bare, bucket_cap_mb=0.0001, **options)
        by_step = [
            mean_of(every_ranks(MoodyModel(), t.ranks, lambda m, r, step=step: mean_square(m, r, step)))
            for step in range(4)
        ]
        warm_up(t, model)
        mean_square(model, t.rank, 0).backward()
        objects = [param.grad for param in model.parameters()]
        with dist_autograd.context() as context_id:
            bare.mood = -1.0
            with pytest.raises(RuntimeError, match="in a bad mood"):
                dist_autograd.backward(context_id, [mean_square(model, t.rank, 1)])
            bare.mood = 1.0
            assert all(param.grad is grad for param, grad in zip(model.parameters(), objects, strict=True))
            check_grads(model, by_step[0], f"{options}: .grad after an error")
            assert set(context_gradients(context_id, model).values()) == {None}
            dist_autograd.backward(context_id, [mean_square(model, t.rank, 2)])
            check_context(context_id, model, by_step[2], f"{options}: the context after an error")
            bare.mood = -1.0
            with pytest.raises(RuntimeError, match="in a bad mood"):
                dist_autograd.backward(context_id, [mean_square(model, t.rank, 1)])
            bare.mood = 1.0
            check_context(context_id, model, by_step[2], f"{options}: the context after another error")
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, 3)])
            check_context(context_id, model, by_step[3], f"{options}: the next context")
        check_grads(model, by_step[0], f"{options}: .grad after the next context")


def an_open_contexts(t: Trainer, name: str, model: Any) -> None:
    """A context stays open while another thread uses the module in one of its own; then it goes on."""
    failures: list[BaseException] = []

    def use_elsewhere() -> None:
        try:
            step_in_context(t, name, model, 1)
        except BaseException as error:
            failures.append(error)

    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank, 0)])
        held = Held(dist_autograd.get_gradients(context_id))
        thread = threading.Thread(target=use_elsewhere)
        thread.start()
        thread.join()
        for failure in failures:
            raise failure
        held.check(f"another thread's context, with {name}")
        dist_autograd.backward(context_id, [mean_square(model, t.rank, 2)])
        check_context(context_id, model, means(t, 0, 2), f"{name}, the open context")


BODIES = [
    *map(
        for_each_model,
        [
            an_earlier_contexts,
            dot_grad,
            accumulated_dot_grad,
            unsynced_contexts_leave_nothing,
            the_users_changes_stay_the_users,
        ],
    ),
    local_gradients_without_sync,
    *on_this_library([], [dot_grad_after_an_error]),
]
# A thread that a thread-rank starts is no worker.
PROCESS_BODIES = [for_each_model(an_open_contexts)]
