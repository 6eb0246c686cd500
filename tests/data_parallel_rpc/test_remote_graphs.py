"""Graphs with more than one way through them: data parallel waits for a parameter's last gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data_parallel.models import Branches
from tests.data_parallel.twins import assert_same_gradient
from tests.data_parallel_rpc.libraries import dist_autograd, fp16_compress_hook, rpc, weft_only
from tests.data_parallel_rpc.modes import (
    context_gradients,
    named_parameters,
    noting_hook,
    rows_of,
    untouched_grad,
)
from tests.data_parallel_rpc.pipelines import (
    BACK,
    FRONT,
    MIDDLE,
    Pipeline,
    RemotePart,
    below,
    call_part,
    check,
    check_context,
    every_ranks,
    make_part,
    make_twin,
    mean_of,
    mean_square,
    without,
)
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    ddp,
    each_wrap,
    replicated,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


MakeModel = Callable[..., nn.Module]


class Forked(nn.Module):
    """The front's output goes to the server and to the back as well; one way is longer than the other."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.front, self.back = make_part(FRONT), make_part(BACK)
        self.middle = middle

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.front(rows))
        there = torch.tanh(self.middle(hidden))
        return self.back(hidden) + self.back(there) + self.back(torch.tanh(self.middle(there)))


class Fanned(nn.Module):
    """Several calls under way at once, to one part and to another."""

    def __init__(self, middle: Any, other: Any) -> None:
        super().__init__()
        self.front, self.back = make_part(FRONT), make_part(BACK)
        self.middle, self.other = middle, other

    def forward(self, rows: Tensor) -> Tensor:
        pieces = torch.tanh(self.front(rows)).split(1)
        waiting = [call_later(self.middle if i % 2 else self.other, piece) for i, piece in enumerate(pieces)]
        return self.back(torch.cat([wait() for wait in waiting]))


class Shortened(nn.Module):
    """Nothing after the remote part: its output is the loss's only way back."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.front = make_part(FRONT)
        self.middle = middle

    def forward(self, rows: Tensor) -> Tensor:
        return self.middle(torch.tanh(self.front(rows)))


def call_later(part: Any, rows: Tensor) -> Callable[[], Tensor]:
    if isinstance(part, RemotePart):
        return rpc.rpc_async(part.rref.owner(), call_part, (part.rref, rows)).wait
    return partial(part, rows)


def check_around(t: Trainer, make: MakeModel, wrap: Wrap, seeds: dict[str, int]) -> None:
    """All that is here is data parallel; `seeds` are those of the parts that are not."""
    there = {name: RemotePart(t.server, make_part, seed) for name, seed in seeds.items()}
    model = wrap(t, make(**there))
    twin = make(**{name: make_part(seed) for name, seed in seeds.items()})
    for i in range(2):
        by_rank = every_ranks(twin, t.ranks, lambda m, rank, i=i: mean_square(m, rank, i))
        right = mean_of(by_rank)
        for name in seeds:
            right = without(right, name)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, i)])
            check_context(context_id, model, right, f"{make.__name__} with {wrap.__name__}")
            for name, part in there.items():
                check(part.gradients(context_id), below(by_rank[t.rank], name), name)


@each_wrap
def test_forked(trainer: Trainer, wrap: Wrap) -> None:
    check_around(trainer, Forked, wrap, {"middle": MIDDLE})


@each_wrap
def test_fanned(trainer: Trainer, wrap: Wrap) -> None:
    check_around(trainer, Fanned, wrap, {"middle": MIDDLE, "other": 9})


@each_wrap
def test_shortened(trainer: Trainer, wrap: Wrap) -> None:
    check_around(trainer, Shortened, wrap, {"middle": MIDDLE})


@weft_only("does not call them under distributed autograd")
@pytest.mark.parametrize("wrap", [ddp, replicated])
def test_hooks_run_once(trainer: Trainer, wrap: Wrap) -> None:
    """Of leaves and non-leaves that have a way here and a way there: once, with the whole gradient."""
    twin, calls = Forked(make_part(MIDDLE)), []
    model = wrap(trainer, Forked(RemotePart(trainer.server, make_part, MIDDLE)))
    for name, param in named_parameters(model):
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append((name, param.grad)))
    by_rank = every_ranks(twin, trainer.ranks, mean_square)
    right = without(mean_of(by_rank), "middle")
    for _ in range(2):
        calls.clear()
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank)])
        assert sorted(name for name, _ in calls) == sorted(right), wrap.__name__
        for name, grad in calls:
            assert_same_gradient(grad, right[name], f"{name} in its hook", tolerance=1e-12)


@weft_only("raises where a parameter has no gradient")
def test_unused_behind_a_remote_part(trainer: Trainer) -> None:
    """Branches of the front, which get their gradients last, or never."""

    def loss(model: nn.Module, rank: int, names: tuple[str, str], step: int) -> Tensor:
        module: Any = getattr(model, "module", model)
        module.front_names = names[rank % 2]
        return mean_square(model, rank, step)

    options: list[dict[str, Any]] = [{"find_unused_parameters": True}, {}]
    for kwargs in options:
        model = ddp(
            trainer, Branching(RemotePart(trainer.server, make_part, MIDDLE)), bucket_cap_mb=0.0001, **kwargs
        )
        twin = Branching(make_part(MIDDLE))
        for step, names in enumerate([("ab", "c"), ("a", "a"), ("b", "c")]):
            bound = partial(loss, names=names, step=step)
            by_rank = every_ranks(twin, trainer.ranks, bound)
            with untouched_grad(model), dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [bound(model, trainer.rank)])
                check_context(context_id, model, without(mean_of(by_rank), "middle"), f"step {step}")


class Branching(Pipeline):
    """A front of branches; which of them run is told before."""

    front_names = "abc"

    def __init__(self, middle: Any) -> None:
        super().__init__(Branches("abc"), middle, make_part(BACK))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.front(rows, self.front_names))
        return self.back(torch.tanh(self.middle(hidden)))


def test_comm_hooks(trainer: Trainer) -> None:
    """fp16, and a user's that gives twice the mean."""
    right = without(mean_of(every_ranks(make_twin(), trainer.ranks, mean_square)), "middle")
    for hook, state, factor, tolerance in [
        (fp16_compress_hook, trainer.group, 1, 1e-3),
        (noting_hook, ([], trainer.group), 2, 1e-12),
    ]:
        middle = RemotePart(trainer.server, make_part, MIDDLE)
        model = ddp(trainer, Pipeline(make_part(FRONT), middle, make_part(BACK)), bucket_cap_mb=0.0001)
        model.register_comm_hook(state, hook)
        for _ in range(2):
            with untouched_grad(model), dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank)])
                for name, grad in context_gradients(context_id, model).items():
                    assert_same_gradient(grad, factor * right[name], name, tolerance)


@weft_only("has no exact=")
@each_wrap
def test_exactly_what_is_used(trainer: Trainer, wrap: Wrap) -> None:
    """A result that nobody uses, and `exact`: nothing waits for it."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = wrap(trainer, Pipeline(make_part(FRONT), middle, make_part(BACK)))
    right = without(mean_of(every_ranks(make_twin(), trainer.ranks, mean_square)), "middle")
    for _ in range(2):
        with untouched_grad(model), dist_autograd.context() as context_id:
            middle(rows_of(trainer.rank).requires_grad_())
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank)], exact=True)
            check_context(context_id, model, right, wrap.__name__)


@weft_only("takes no gradients of roots")
@each_wrap
def test_roots_with_gradients(trainer: Trainer, wrap: Wrap) -> None:
    """An output with the gradient that it is given, in place of a loss."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = wrap(trainer, Pipeline(make_part(FRONT), middle, make_part(BACK)))
    by_rank = every_ranks(
        make_twin(), trainer.ranks, lambda m, rank: (m(rows_of(rank)) * weights(rank)).sum()
    )
    with untouched_grad(model), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(rows_of(trainer.rank))], gradients=[weights(trainer.rank)])
        check_context(context_id, model, without(mean_of(by_rank), "middle"), wrap.__name__)


def weights(rank: int) -> Tensor:
    return rows_of(rank, 77)
