"""More than one forward or backward in a step of compiled models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compiler.pairs import LONG, MAY_WARN, WRAPS, Pair, fresh, inner, make_rows, square_loss
from tests.ranks import run_on

pytestmark = [run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **LONG), MAY_WARN]


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


@run_on(gloo=2, wrap=["replicate"], kind=["plain"], **LONG)
@run_on(gloo=2, wrap=["ddp"], kind=["plain"], full=True, **LONG)
@run_on(weft=2, wrap=WRAPS, kind=["plain"], full=True, **LONG)
@run_on(gloo=2, weft=2, wrap=WRAPS, kind=["torch"], full=True, **LONG)
def test_in_turns(wrap: str, kind: str) -> None:
    """Local gradients are reduced with those of the next synced step; they stay local until then."""
    fresh()
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


def test_gradients_kept(wrap: str) -> None:
    """Without zero_grad what was reduced adds up, as in eager."""
    fresh()
    pair = Pair(wrap=wrap, is_exact=False)
    for salt in range(3):
        pair.backward(salt)
        pair.check()


def test_gradients_zeroed_in_place(wrap: str) -> None:
    fresh()
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


def test_several_forwards(wrap: str) -> None:
    fresh()
    Pair(wrap=wrap).train(loss=two_forwards)


def another_size(model: Any, salt: int, rank: int | None = None) -> Tensor:
    """The second forward is another graph."""
    rank = dist.get_rank() if rank is None else rank
    return square_loss(model, salt, rank) + model(make_rows(rank, salt + 50, 7)).square().mean()


@run_on(weft=2, wrap=["ddp"], **LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **LONG)
def test_several_graphs(wrap: str) -> None:
    fresh()
    Pair(wrap=wrap).train(loss=another_size)


@run_on(weft=2, wrap=["ddp"], **LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **LONG)
def test_compiled_and_eager(wrap: str) -> None:
    """A forward of the compiled module and one of the module itself, in either order, then one backward."""
    fresh()
    for is_compiled_first in (True, False):
        fresh()
        pair = Pair(wrap=wrap, is_exact=False)

        def loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
            second = pair.under if model is pair.compiled else model  # noqa: B023
            models = (model, second) if is_compiled_first else (second, model)  # noqa: B023
            return square_loss(models[0], salt, rank) + square_loss(models[1], salt + 50, rank)

        pair.train(loss=loss)


def test_compiled_and_eager_steps(wrap: str) -> None:
    """Steps of the compiled module and of the module itself in turns."""
    fresh()
    pair = Pair(wrap=wrap)
    compiled = pair.compiled
    for salt in range(6):
        pair.compiled = compiled if salt % 3 else pair.under
        pair.step(salt)


def test_evaluation_between(wrap: str) -> None:
    """No gradient, no reduction, and the next step is as if nothing had been."""
    fresh()
    pair = Pair(wrap=wrap)
    for salt in range(4):
        pair.step(salt)
        rows = make_rows(dist.get_rank(), salt + 70)
        for is_inference in (False, True) if salt % 2 else (False,):
            with torch.inference_mode() if is_inference else torch.no_grad():
                assert torch.equal(pair.compiled(rows), pair.plain(rows))


def test_forward_without_backward(wrap: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)
    for salt in range(4):
        if salt % 2:
            for model in (pair.plain, pair.compiled):
                square_loss(model, salt + 80)
        pair.step(salt)
