"""Compiled training in small: what every run does, by every way to compile it.

Each against its eager twin and a bare one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compiler.pairs import (
    LEARNING_RATE,
    LIMITS,
    LONG,
    MAY_WARN,
    WRAPS,
    Pair,
    backward_context,
    fresh,
    make_rows,
)
from tests.ranks import run_on

pytestmark = [run_on(gloo=2, wrap=WRAPS, full=True, **LIMITS), MAY_WARN]


def steps(wrap: str, backend: str, *, fullgraph: bool) -> None:
    fresh()
    Pair(wrap=wrap, backend=backend, fullgraph=fullgraph, is_exact=backend != "inductor").train()


@run_on(weft=2, wrap=["ddp"], **LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **LONG)
def test_every_way(wrap: str) -> None:
    for backend in ("eager", "aot_eager"):
        for fullgraph in (False, True):
            steps(wrap, backend, fullgraph=fullgraph)


@run_on(gloo=2, wrap=["replicate"], kind=["torch", "weft"], full=True, **LIMITS)
@run_on(weft=2, wrap=["ddp"], kind=["torch", "weft"], full=True, **LIMITS)
def test_every_backward(wrap: str, kind: str) -> None:
    """Each backend's forward, and backward traced, or not, in turns with one that is not."""
    for backend in ("eager", "aot_eager"):
        fresh()
        pair = Pair(wrap=wrap, backend=backend)
        pair.train(kind=kind)
        pair.step(7)
        pair.step(8, kind=kind)


@run_on(gloo=2, wrap=["replicate"], kind=["weft"], **LIMITS)
@run_on(weft=2, wrap=["ddp"], kind=["weft"], full=True, **LIMITS)
def test_backward_only(wrap: str, kind: str) -> None:
    """The forward is not compiled, its backward is traced."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.compiled = pair.under
    pair.train(kind=kind)


@run_on(gloo=2, wrap=["replicate"], kind=["torch"], **LIMITS)
@run_on(weft=2, wrap=["ddp"], kind=["torch"], full=True, **LIMITS)
def test_too_late(wrap: str, kind: str) -> None:
    """A backward that torch's switch lets be traced after an eager forward says what to do."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.compiled = pair.under
    with pytest.raises(Exception, match=r"Enable it with weft\.compiler\.autograd"):
        pair.train(kind=kind)


@run_on(gloo=2, wrap=["replicate"], kind=["torch", "weft"], full=True, **LIMITS)
@run_on(weft=2, wrap=["ddp"], kind=["torch", "weft"], full=True, **LIMITS)
def test_forward_and_backward_in_one(wrap: str, kind: str) -> None:
    """compile() in place, as a module's method, with forward inside of the context too."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.under.compile(backend="aot_eager", fullgraph=True)
    pair.compiled = pair.under
    for salt in range(3):
        with backward_context(kind):
            pair.step(salt)


@run_on(gloo=2, wrap=["replicate"], kind=["plain"], **LONG)
@run_on(weft=2, wrap=["ddp"], kind=["plain"], full=True, **LONG)
@run_on(gloo=2, wrap=["ddp"], kind=["torch"], full=True, **LONG)
def test_with_inductor(wrap: str, kind: str) -> None:
    """Inductor may sum in another order: close, and in every step."""
    fresh()
    Pair(wrap=wrap, backend="inductor", is_exact=False).train(kind=kind)


def test_optimizers(wrap: str) -> None:
    """A whole run with Adam: parameters stay the eager ones, and those of all ranks."""
    fresh()
    pair = Pair(wrap=wrap)
    chosen = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in pair.models()]
    for salt in range(5):
        pair.zero_grad()
        pair.backward(salt)
        pair.check()
        for optimizer in chosen:
            optimizer.step()
        pair.num_steps += 1


def test_compiled_from_outside(wrap: str) -> None:
    """torch.compile of a function that calls the replica, its loss included."""
    fresh()
    pair = Pair(wrap=wrap)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x * 2).square().mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)

    def by_rank(model: Any, salt: int, rank: int | None = None) -> torch.Tensor:
        rows = make_rows(dist.get_rank() if rank is None else rank, salt)
        return compiled(pair.under, rows) if model is pair.compiled else loss(model, rows)

    pair.train(loss=by_rank)


@run_on(gloo=4, weft=4, wrap=WRAPS, full=True, **LONG)
def test_four_ranks(wrap: str) -> None:
    steps(wrap, "aot_eager", fullgraph=True)
