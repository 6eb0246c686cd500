"""Compiled functions that hold more than a forward: backward too, or the loss, or the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compiler.pairs import LIMITS, MAY_WARN, Pair, fresh, inner, make_rows, square_loss
from tests.ranks import run_on

pytestmark = [
    run_on(gloo=2, wrap=["replicate"], backend=["aot_eager"], full=True, **LIMITS),
    run_on(gloo=2, wrap=["ddp"], backend=["eager"], full=True, **LIMITS),
    MAY_WARN,
]


def run_steps(pair: Pair, step: Callable[[Tensor], Any], num_steps: int = 3) -> None:
    for salt in range(num_steps):
        pair.zero_grad()
        square_loss(pair.plain, salt).backward()
        step(make_rows(dist.get_rank(), salt))
        for rank in range(dist.get_world_size()):
            (square_loss(pair.bare, salt, rank) / dist.get_world_size()).backward()
        pair.check()
        pair.update()


@run_on(gloo=2, wrap=["replicate"], backend=["aot_eager"], **LIMITS)
@run_on(gloo=2, wrap=["ddp"], backend=["eager"], full=True, **LIMITS)
def test_by_method(wrap: str, backend: str) -> None:
    """Dynamo breaks the graph at backward(), and is still on while backward calls Python."""
    fresh()
    pair = Pair(wrap=wrap)

    def step(rows: Tensor) -> None:
        pair.under(rows).square().mean().backward()

    run_steps(pair, torch.compile(step, backend=backend))


def test_by_function(wrap: str, backend: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)

    def step(rows: Tensor) -> None:
        torch.autograd.backward([pair.under(rows).square().mean()])

    run_steps(pair, torch.compile(step, backend=backend))


def test_compiled_inside(wrap: str, backend: str) -> None:
    """A compiled module in a compiled step."""
    fresh()
    pair = Pair(wrap=wrap, backend=backend, fullgraph=False)

    def step(rows: Tensor) -> None:
        pair.compiled(rows).square().mean().backward()

    run_steps(pair, torch.compile(step, backend=backend))


def test_eager_inside(wrap: str, backend: str) -> None:
    """The forward is kept out of the compiler, its backward runs in a compiled step."""
    fresh()
    pair = Pair(wrap=wrap)
    forward: Any = torch._dynamo.disable(lambda rows: pair.under(rows))

    def step(rows: Tensor) -> None:
        forward(rows).square().mean().backward()

    run_steps(pair, torch.compile(step, backend=backend))


def test_backward_inside(wrap: str, backend: str) -> None:
    """Forward, eager or compiled, before a compiled function that runs backward."""
    for is_compiled in (False, True):
        fresh()
        pair = Pair(wrap=wrap, backend=backend)
        model = pair.compiled if is_compiled else pair.under

        def finish(output: Tensor) -> None:
            output.square().mean().backward()

        compiled = torch.compile(finish, backend=backend)
        run_steps(pair, lambda rows: compiled(model(rows)))  # noqa: B023


def test_broken_before_backward(wrap: str, backend: str) -> None:
    fresh()
    pair = Pair(wrap=wrap)

    def loss(rows: Tensor) -> Tensor:
        output = pair.under(rows)
        torch._dynamo.graph_break()
        return output.square().mean()

    compiled = torch.compile(loss, backend=backend)
    run_steps(pair, lambda rows: compiled(rows).backward())


def test_with_the_optimizer(wrap: str, backend: str) -> None:
    """The whole step, zero_grad and update included."""
    fresh()
    pair = Pair(wrap=wrap)
    optimizer = torch.optim.SGD(pair.under.parameters(), lr=0.05)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        pair.under(rows).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(step, backend=backend)
    for salt in range(3):
        compiled(make_rows(dist.get_rank(), salt))
        pair.plain.zero_grad()
        square_loss(pair.plain, salt).backward()
        with torch.no_grad():
            for param in pair.plain.parameters():
                assert param.grad is not None
                param -= 0.05 * param.grad
        for (name, param), right in zip(
            inner(pair.under, wrap).named_parameters(), pair.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(param, right, msg=f"{name}, step {salt}")
