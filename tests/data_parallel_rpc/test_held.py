"""Gradients that somebody holds on to keep their values, whatever the module is used for next."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data_parallel.twins import assert_same_gradient
from tests.data_parallel_rpc.libraries import ON_TORCH, dist_autograd, weft_only
from tests.data_parallel_rpc.modes import Gradients, context_gradients, copied, local_of, named_parameters
from tests.data_parallel_rpc.pipelines import (
    BACK,
    FRONT,
    check_context,
    every_ranks,
    make_part,
    mean_of,
    mean_square,
)
from tests.data_parallel_rpc.test_remote_parts import Moody
from tests.data_parallel_rpc.trainers import LIMITS, WRAPS, Trainer, Wrap, ddp, sharded, without_sync
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


def ddp_with_views(trainer: Trainer, module: nn.Module, **options: Any) -> Any:
    return ddp(trainer, module, gradient_as_bucket_view=True, **options)


# torch's views are the reducer's memory, in every context.
HELD = WRAPS if ON_TORCH else [*WRAPS, ddp_with_views]

each_wrap = pytest.mark.parametrize("wrap", HELD)


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


def step_in_context(t: Trainer, model: nn.Module, step: int) -> Held:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank, step)])
        check_context(context_id, model, means(t, step), f"step {step}")
        return Held(dist_autograd.get_gradients(context_id))


@each_wrap
def test_an_earlier_contexts_gradients_stay(trainer: Trainer, wrap: Wrap) -> None:
    """A context's gradients after it has ended, while the same module goes on."""
    model = wrap(trainer, make_part(BACK))
    warm_up(trainer, model)
    held = [step_in_context(trainer, model, 0)]
    for step in (1, 2):
        held.append(step_in_context(trainer, model, step))
        for one in held:
            one.check("a later context")
    mean_square(model, trainer.rank, 3).backward()
    for one in held:
        one.check("loss.backward()")
    model.zero_grad(set_to_none=False)
    for one in held:
        one.check("zero_grad")
    with without_sync(model):
        mean_square(model, trainer.rank, 4).backward()
    held.append(step_in_context(trainer, model, 5))
    for one in held:
        one.check("a context after no_sync")


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


@each_wrap
def test_grad_stays(trainer: Trainer, wrap: Wrap) -> None:
    """`.grad`, which may lie in the reducer's own memory, while the same module is used in a context."""
    model = wrap(trainer, make_part(BACK))
    warm_up(trainer, model)
    mean_square(model, trainer.rank, 0).backward()
    check_grads(model, means(trainer, 0), ".grad at first")
    objects = [param.grad for param in model.parameters()]
    held = [step_in_context(trainer, model, step) for step in (1, 2)]
    assert all(param.grad is grad for param, grad in zip(model.parameters(), objects, strict=True))
    check_grads(model, means(trainer, 0), ".grad after two contexts")
    # It goes on as if there had been no context.
    mean_square(model, trainer.rank, 3).backward()
    check_grads(model, means(trainer, 0, 3), ".grad, accumulated")
    for one in held:
        one.check("loss.backward()")


@each_wrap
def test_accumulated_grad_stays(trainer: Trainer, wrap: Wrap) -> None:
    """What no_sync has left in `.grad` is not the context's, and is reduced by the next loss.backward()."""
    model = wrap(trainer, make_part(BACK))
    with without_sync(model):
        mean_square(model, trainer.rank, 0).backward()
    step_in_context(trainer, model, 1)
    mean_square(model, trainer.rank, 2).backward()
    check_grads(model, means(trainer, 0, 2), ".grad after no_sync, a context and a sync")


@each_wrap
def test_unsynced_contexts_leave_nothing(trainer: Trainer, wrap: Wrap) -> None:
    """What a context without sync has added up ends with it."""
    model = wrap(trainer, make_part(BACK))
    with dist_autograd.context() as context_id, without_sync(model):
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 0)])
    step_in_context(trainer, model, 1)
    mean_square(model, trainer.rank, 2).backward()
    check_grads(model, means(trainer, 2), ".grad after an unsynced context")


@pytest.mark.parametrize("wrap", [wrap for wrap in HELD if wrap is not sharded])
def test_local_gradients_without_sync(trainer: Trainer, wrap: Wrap) -> None:
    """Without sync a context has this trainer's own. Shards are full until then, and nowhere to be seen."""
    own = every_ranks(make_part(BACK), [trainer.rank], mean_square)[0]
    model = wrap(trainer, make_part(BACK))
    with dist_autograd.context() as context_id, without_sync(model):
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank)])
        check_context(context_id, model, own, "without sync")
    assert all(param.grad is None for param in model.parameters())


@each_wrap
def test_the_users_changes_stay_the_users(trainer: Trainer, wrap: Wrap) -> None:
    """Somebody scales the gradients that a context has handed out; later ones don't know of it."""
    model = wrap(trainer, make_part(BACK))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 0)])
        for grad in dist_autograd.get_gradients(context_id).values():
            local_of(grad).zero_()
    for step in (0, 1):
        step_in_context(trainer, model, step)
    mean_square(model, trainer.rank, 2).backward()
    check_grads(model, means(trainer, 2), ".grad")


class MoodyModel(nn.Module):
    """Fails in the middle of backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = make_part(FRONT), make_part(BACK)
        self.mood = 1.0

    def forward(self, rows: Tensor) -> Tensor:
        return self.back(Moody.apply(torch.tanh(self.front(rows)), torch.tensor(self.mood)))


@weft_only("does not recover from an error")
@pytest.mark.parametrize("wrap", [ddp, ddp_with_views, sharded])
def test_grad_stays_after_an_error(trainer: Trainer, wrap: Wrap) -> None:
    """A backward that fails half way, on all trainers, leaves `.grad` alone and nothing in the context."""
    bare = MoodyModel()
    model = wrap(trainer, bare, **({} if wrap is sharded else {"bucket_cap_mb": 0.0001}))
    by_step = [
        mean_of(every_ranks(MoodyModel(), trainer.ranks, lambda m, r, step=step: mean_square(m, r, step)))
        for step in range(4)
    ]
    warm_up(trainer, model)
    mean_square(model, trainer.rank, 0).backward()
    objects = [param.grad for param in model.parameters()]
    with dist_autograd.context() as context_id:
        bare.mood = -1.0
        with pytest.raises(RuntimeError, match="in a bad mood"):
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 1)])
        bare.mood = 1.0
        assert all(param.grad is grad for param, grad in zip(model.parameters(), objects, strict=True))
        check_grads(model, by_step[0], ".grad after an error")
        assert set(context_gradients(context_id, model).values()) == {None}
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 2)])
        check_context(context_id, model, by_step[2], "the context after an error")
        bare.mood = -1.0
        with pytest.raises(RuntimeError, match="in a bad mood"):
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 1)])
        bare.mood = 1.0
        check_context(context_id, model, by_step[2], "the context after another error")
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 3)])
        check_context(context_id, model, by_step[3], "the next context")
    check_grads(model, by_step[0], ".grad after the next context")


@run_on(weft=3, gloo=3, full=True, **LIMITS)
@each_wrap
def test_an_open_contexts_gradients_stay(trainer: Trainer, wrap: Wrap) -> None:
    """A context stays open while another thread uses the module in one of its own; then it goes on.

    On processes alone: a thread that a thread-rank starts is no worker.
    """
    model = wrap(trainer, make_part(BACK))
    failures: list[BaseException] = []

    def use_elsewhere() -> None:
        try:
            step_in_context(trainer, model, 1)
        except BaseException as error:
            failures.append(error)

    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 0)])
        held = Held(dist_autograd.get_gradients(context_id))
        thread = threading.Thread(target=use_elsewhere)
        thread.start()
        thread.join()
        for failure in failures:
            raise failure
        held.check("another thread's context")
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 2)])
        check_context(context_id, model, means(trainer, 0, 2), "the open context")
