"""Graphs with more than one way through them: data parallel waits for a parameter's last gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.models import Branches
from tests.data_parallel.twins import assert_same_gradient
from tests.ddp_rpc_bodies.libraries import dist_autograd, fp16_compress_hook, on_this_library, rpc
from tests.ddp_rpc_bodies.modes import context_gradients, named_parameters, rows_of, untouched_grad
from tests.ddp_rpc_bodies.pipelines import (
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
from tests.ddp_rpc_bodies.running import Trainer
from tests.ddp_rpc_bodies.same_options import noting_hook
from tests.ddp_rpc_bodies.wraps import WRAPS, Wrap, ddp, replicated

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


def forked(t: Trainer) -> None:
    for wrap in WRAPS:
        check_around(t, Forked, wrap, {"middle": MIDDLE})


def fanned(t: Trainer) -> None:
    for wrap in WRAPS:
        check_around(t, Fanned, wrap, {"middle": MIDDLE, "other": 9})


def shortened(t: Trainer) -> None:
    for wrap in WRAPS:
        check_around(t, Shortened, wrap, {"middle": MIDDLE})


def hooks_run_once(t: Trainer) -> None:
    """Of leaves and non-leaves that have a way here and a way there: once, with the whole gradient."""
    twin, calls = Forked(make_part(MIDDLE)), []
    for wrap in (ddp, replicated):
        model = wrap(t, Forked(RemotePart(t.server, make_part, MIDDLE)))
        for name, param in named_parameters(model):
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: calls.append((name, param.grad))
            )
        by_rank = every_ranks(twin, t.ranks, mean_square)
        right = without(mean_of(by_rank), "middle")
        for _ in range(2):
            calls.clear()
            with untouched_grad(model), dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, t.rank)])
            assert sorted(name for name, _ in calls) == sorted(right), wrap.__name__
            for name, grad in calls:
                assert_same_gradient(grad, right[name], f"{name} in its hook", tolerance=1e-12)


def unused_behind_a_remote_part(t: Trainer) -> None:
    """Branches of the front, which get their gradients last, or never."""

    def loss(model: nn.Module, rank: int, names: tuple[str, str], step: int) -> Tensor:
        module: Any = getattr(model, "module", model)
        module.front_names = names[rank % 2]
        return mean_square(model, rank, step)

    options: list[dict[str, Any]] = [{"find_unused_parameters": True}, {}]
    for kwargs in options:
        model = ddp(t, Branching(RemotePart(t.server, make_part, MIDDLE)), bucket_cap_mb=0.0001, **kwargs)
        twin = Branching(make_part(MIDDLE))
        for step, names in enumerate([("ab", "c"), ("a", "a"), ("b", "c")]):
            bound = partial(loss, names=names, step=step)
            by_rank = every_ranks(twin, t.ranks, bound)
            with untouched_grad(model), dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [bound(model, t.rank)])
                check_context(context_id, model, without(mean_of(by_rank), "middle"), f"step {step}")


class Branching(Pipeline):
    """A front of branches; which of them run is told before."""

    front_names = "abc"

    def __init__(self, middle: Any) -> None:
        super().__init__(Branches("abc"), middle, make_part(BACK))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.front(rows, self.front_names))
        return self.back(torch.tanh(self.middle(hidden)))


def comm_hooks(t: Trainer) -> None:
    """fp16, and a user's that gives twice the mean."""
    right = without(mean_of(every_ranks(make_twin(), t.ranks, mean_square)), "middle")
    for hook, state, factor, tolerance in [
        (fp16_compress_hook, t.group, 1, 1e-3),
        (noting_hook, ([], t.group), 2, 1e-12),
    ]:
        middle = RemotePart(t.server, make_part, MIDDLE)
        model = ddp(t, Pipeline(make_part(FRONT), middle, make_part(BACK)), bucket_cap_mb=0.0001)
        model.register_comm_hook(state, hook)
        for _ in range(2):
            with untouched_grad(model), dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, t.rank)])
                for name, grad in context_gradients(context_id, model).items():
                    assert_same_gradient(grad, factor * right[name], name, tolerance)


def exactly_what_is_used(t: Trainer) -> None:
    """A result that nobody uses, and `exact`: nothing waits for it."""
    for wrap in WRAPS:
        middle = RemotePart(t.server, make_part, MIDDLE)
        model = wrap(t, Pipeline(make_part(FRONT), middle, make_part(BACK)))
        right = without(mean_of(every_ranks(make_twin(), t.ranks, mean_square)), "middle")
        for _ in range(2):
            with untouched_grad(model), dist_autograd.context() as context_id:
                middle(rows_of(t.rank).requires_grad_())
                dist_autograd.backward(context_id, [mean_square(model, t.rank)], exact=True)
                check_context(context_id, model, right, wrap.__name__)


def roots_with_gradients(t: Trainer) -> None:
    """An output with the gradient that it is given, in place of a loss."""
    for wrap in WRAPS:
        middle = RemotePart(t.server, make_part, MIDDLE)
        model = wrap(t, Pipeline(make_part(FRONT), middle, make_part(BACK)))
        by_rank = every_ranks(make_twin(), t.ranks, lambda m, rank: (m(rows_of(rank)) * weights(rank)).sum())
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model(rows_of(t.rank))], gradients=[weights(t.rank)])
            check_context(context_id, model, without(mean_of(by_rank), "middle"), wrap.__name__)


def weights(rank: int) -> Tensor:
    return rows_of(rank, 77)


BODIES = on_this_library(
    [forked, fanned, shortened, comm_hooks],
    [hooks_run_once, unused_behind_a_remote_part, exactly_what_is_used, roots_with_gradients],
)
