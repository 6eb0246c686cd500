"""More than one forward or backward in a step of compiled models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compile_bodies.pairs import Pair, fresh, inner, make_rows, square_loss


def local_step(pair: Pair, salt: int, kind: str) -> None:
    """A backward whose gradients stay where they are, in the module's own way."""
    models = [pair.plain, pair.under]
    if pair.wrap == "ddp":
        with pair.plain.no_sync(), pair.under.no_sync():
            pair.backward(salt, kind=kind)
        return
    for model in models:
        model.set_requires_gradient_sync(False)
    pair.backward(salt, kind=kind)
    for model in models:
        model.set_requires_gradient_sync(True)


def in_turns(wrap: str, kind: str = "plain") -> None:
    """Local gradients are reduced with those of the next synced step; they stay local until then."""
    # Sums have another order where gradients are there already.
    pair = Pair(wrap=wrap, is_exact=False)
    for salt in range(0, 12, 3):
        pair.zero_grad()
        num_local = (salt // 3) % 3
        for more in range(num_local):
            local_step(pair, salt + more, kind)
        if num_local:
            assert_local(pair)
        pair.backward(salt + num_local, kind=kind)
        pair.check(what=f"after {num_local} local")
        pair.update()


def assert_local(pair: Pair) -> None:
    pair.check(with_bare=False)
    for name, param in inner(pair.under, pair.wrap).named_parameters():
        assert param.grad is not None
        others = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.grad.contiguous())
        assert not torch.equal(others[0], others[1]), f"{name} was reduced"


def in_turns_under_compiled_autograd(wrap: str) -> None:
    in_turns(wrap, "torch")


def gradients_kept(wrap: str) -> None:
    """Without zero_grad what was reduced adds up, as in eager."""
    pair = Pair(wrap=wrap, is_exact=False)
    for salt in range(3):
        pair.backward(salt)
        pair.check()


def gradients_zeroed_in_place(wrap: str) -> None:
    for view in (False, True):
        fresh()
        pair = Pair(wrap=wrap, gradient_as_bucket_view=view)
        for salt in range(3):
            for model in pair.models():
                model.zero_grad(set_to_none=False)
            pair.backward(salt)
            pair.check()
            pair.update()


def two_forwards(model: Any, salt: int, rank: int | None = None) -> Tensor:
    return square_loss(model, salt, rank) + square_loss(model, salt + 50, rank)


def several_forwards(wrap: str) -> None:
    Pair(wrap=wrap).train(loss=two_forwards)


def another_size(model: Any, salt: int, rank: int | None = None) -> Tensor:
    """The second forward is another graph."""
    rank = dist.get_rank() if rank is None else rank
    return square_loss(model, salt, rank) + model(make_rows(rank, salt + 50, 7)).square().mean()


def several_graphs(wrap: str) -> None:
    Pair(wrap=wrap).train(loss=another_size)


def compiled_and_eager(wrap: str) -> None:
    """A forward of the compiled module and one of the module itself, in either order, then one backward."""
    for is_compiled_first in (True, False):
        fresh()
        pair = Pair(wrap=wrap, is_exact=False)

        def loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
            second = pair.under if model is pair.compiled else model  # noqa: B023
            models = (model, second) if is_compiled_first else (second, model)  # noqa: B023
            return square_loss(models[0], salt, rank) + square_loss(models[1], salt + 50, rank)

        pair.train(loss=loss)


def compiled_and_eager_steps(wrap: str) -> None:
    """Steps of the compiled module and of the module itself in turns."""
    pair = Pair(wrap=wrap)
    compiled = pair.compiled
    for salt in range(6):
        pair.compiled = compiled if salt % 3 else pair.under
        pair.step(salt)


def evaluation_between(wrap: str) -> None:
    """No gradient, no reduction, and the next step is as if nothing had been."""
    pair = Pair(wrap=wrap)
    for salt in range(4):
        pair.step(salt)
        rows = make_rows(dist.get_rank(), salt + 70)
        for is_inference in (False, True) if salt % 2 else (False,):
            with torch.inference_mode() if is_inference else torch.no_grad():
                assert torch.equal(pair.compiled(rows), pair.plain(rows))


def forward_without_backward(wrap: str) -> None:
    pair = Pair(wrap=wrap)
    for salt in range(4):
        if salt % 2:
            for model in (pair.plain, pair.compiled):
                square_loss(model, salt + 80)
        pair.step(salt)


BODIES = [
    in_turns,
    in_turns_under_compiled_autograd,
    gradients_kept,
    gradients_zeroed_in_place,
    several_forwards,
    several_graphs,
    compiled_and_eager,
    compiled_and_eager_steps,
    evaluation_between,
    forward_without_backward,
]
