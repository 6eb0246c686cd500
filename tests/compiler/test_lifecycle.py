"""What happens to a compiled replica around its steps: errors, copies, saved states, Join."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.compiler.pairs import (
    LIMITS,
    MAY_WARN,
    WRAPS,
    Pair,
    filled,
    fresh,
    inner,
    make_rows,
    mlp,
    square_loss,
)
from tests.ranks import run_on
from weft.join import Join

pytestmark = [run_on(gloo=2, wrap=WRAPS, full=True, **LIMITS), MAY_WARN]


class Raising(nn.Module):
    """Raises in the middle when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, is_wrong: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        if is_wrong:
            raise KeyError("on purpose")
        return self.second(x)


def assert_parameters(model: Any, names: list[str]) -> None:
    assert [name for name, _ in model.named_parameters()] == names
    assert all(type(param) is nn.Parameter for param in model.parameters())
    for module in model.modules():
        for name in module._parameters:
            assert name not in vars(module), f"{name} is an attribute beside the parameter"


@run_on(gloo=2, wrap=["replicate"], **LIMITS)
@run_on(gloo=2, wrap=["ddp"], full=True, **LIMITS)
def test_errors_in_forward(wrap: str) -> None:
    """The module is usable after it, and its parameters are what they were."""
    fresh()
    pair = Pair(lambda: filled(Raising()), wrap, fullgraph=False)
    rows = make_rows(dist.get_rank(), 0)
    model = inner(pair.under, wrap)
    names = [name for name, _ in model.named_parameters()]
    kept = list(model.parameters())
    for salt in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            pair.compiled(rows, is_wrong=True)
        with pytest.raises(KeyError, match="on purpose"):
            pair.plain(rows, is_wrong=True)
        assert_parameters(model, names)
        assert all(param is other for param, other in zip(model.parameters(), kept, strict=True))
        pair.step(salt)


def test_errors_of_shape(wrap: str) -> None:
    """Rows that don't fit: an error while the forward is traced, or by a graph that is there."""
    fresh()
    pair = Pair(wrap=wrap)
    model = inner(pair.under, wrap)
    names = [name for name, _ in model.named_parameters()]
    for salt in range(2):
        with pytest.raises(Exception, match=r"shapes? cannot|invalid for|size|multiplied"):
            pair.compiled(torch.zeros(2, 5, dtype=torch.float64))
        assert_parameters(model, names)
        pair.step(salt)
        pair.compiled(make_rows(0, salt))
        assert_parameters(model, names)


def test_states(wrap: str) -> None:
    """Names and values are the eager one's, and a saved state can be loaded after compiling."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(steps=2)
    plain, under = pair.plain.state_dict(), pair.under.state_dict()
    assert list(plain) == list(under)
    assert all(torch.equal(plain[name], under[name]) for name in plain)
    assert all(type(value) is Tensor for value in under.values())
    file = io.BytesIO()
    torch.save(under, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    pair.train(steps=2)
    for model in (pair.plain, pair.under):
        model.load_state_dict(saved)
    pair.bare.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    pair.train(steps=2)


def test_copies(wrap: str) -> None:
    """A copy of the module, made after steps, has its own parameters, and trains by itself."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(steps=2)
    model = inner(pair.under, wrap)
    bare = mlp()
    bare.load_state_dict(model.state_dict())
    other = copy.deepcopy(pair.under)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(other, backend="aot_eager")
    for salt in range(3):
        other.zero_grad()
        bare.zero_grad()
        square_loss(compiled, salt).backward()
        for rank in range(dist.get_world_size()):
            (square_loss(bare, salt, rank) / dist.get_world_size()).backward()
        for (name, param), right in zip(
            inner(other, wrap).named_parameters(), bare.parameters(), strict=True
        ):
            torch.testing.assert_close(param.grad, right.grad, msg=f"the copy's {name}, step {salt}")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    pair.train(steps=2)


def test_copies_of_the_compiled(wrap: str) -> None:
    """deepcopy of what torch.compile gave."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.train(steps=2)
    other = copy.deepcopy(pair.compiled)
    bare = mlp()
    bare.load_state_dict(inner(pair.under, wrap).state_dict())
    square_loss_of = square_loss(other, 5)
    other.zero_grad()
    square_loss_of.backward()
    for rank in range(dist.get_world_size()):
        (square_loss(bare, 5, rank) / dist.get_world_size()).backward()
    for (name, param), right in zip(inner(other, wrap).named_parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(param.grad, right.grad, msg=name)
    pair.train(steps=2)


@run_on(weft=2, **LIMITS)
@run_on(gloo=2, full=True, **LIMITS)
def test_joined() -> None:
    """Uneven steps: the model of a single process that sees the rows of those still active."""
    for backend in ("eager", "aot_eager"):
        fresh()
        size = dist.get_world_size()
        model: Any = weft.DistributedDataParallel(mlp())
        compiled = torch.compile(model, backend=backend, fullgraph=False)
        with Join([model], divide_by_initial_world_size=False):
            for step in range(2 + 2 * dist.get_rank()):
                model.zero_grad()
                square_loss(compiled, step).backward()
                descend(model)
        bare = mlp()
        for step in range(2 * size):
            active = [rank for rank in range(size) if step < 2 + 2 * rank]
            bare.zero_grad()
            for rank in active:
                (square_loss(bare, step, rank) / len(active)).backward()
            descend(bare)
        for (name, param), right in zip(model.module.named_parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(param, right, msg=f"{backend}, {name}")


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param -= 0.05 * param.grad


def test_compiled_before_anything(wrap: str) -> None:
    """The first use of the module is a compiled evaluation; training comes after it."""
    fresh()
    pair = Pair(wrap=wrap)
    rows = make_rows(dist.get_rank(), 0)
    with torch.no_grad():
        assert torch.equal(pair.compiled(rows), pair.bare(rows))
    pair.train()


def test_hooks_of_users(wrap: str) -> None:
    """A post-accumulate hook sees the mean, once a step."""
    fresh()
    pair = Pair(wrap=wrap)
    seen: list[Tensor] = []
    param: Any = next(inner(pair.under, wrap).parameters())
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for salt in range(3):
        pair.step(salt)
        assert len(seen) == salt + 1
        assert torch.equal(seen[-1], param.grad)


@run_on(gloo=2, wrap=["ddp"], **LIMITS)
@run_on(gloo=2, wrap=["replicate"], full=True, **LIMITS)
def test_autograd_grad(wrap: str) -> None:
    """torch.autograd.grad through the compiled module communicates nothing, and the next step is right."""
    fresh()
    pair = Pair(wrap=wrap)
    pair.step(0)
    with weft.record() as events:
        rows = make_rows(dist.get_rank(), 5).requires_grad_()
        (grad,) = torch.autograd.grad(pair.compiled(rows).sum(), [rows])
    bare_rows = rows.detach().requires_grad_()
    (right,) = torch.autograd.grad(pair.bare(bare_rows).sum(), [bare_rows])
    torch.testing.assert_close(grad, right)
    assert [event.op for event in events if event.op == "all_reduce"] == []
    pair.step(1)
