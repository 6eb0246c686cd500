"""What forward may return: any container, some of it without gradient, some of it unused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.data_parallel.cases import cases
from tests.data_parallel.libraries import ON_TORCH, weft_only
from tests.data_parallel.twins import WIDTH, Twin, filled, make_rows
from tests.ranks import run_on

pytestmark = run_on(threads=2)

Pack = Callable[[torch.Tensor, torch.Tensor], Any]
Unpack = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


class Two(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Both:
    left: torch.Tensor
    right: torch.Tensor
    note: str = "as it was"


class Plain:
    """No container that anyone knows."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


CONTAINERS: dict[str, tuple[Pack, Unpack]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, b], tuple),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: (out["a"], out["b"])),
    "ordered dict": (
        lambda a, b: OrderedDict(b=b, a=a),
        lambda out: (out["a"], out["b"]),
    ),
    "named tuple": (Two, lambda out: (out.left, out.right)),
    "dataclass": (Both, lambda out: (out.left, out.right)),
    "nested": (
        lambda a, b: {"x": [a, (None, {"y": Two(b, b)})], "n": 3},
        lambda out: (out["x"][0], out["x"][1][1]["y"].left),
    ),
    "plain object": (Plain, lambda out: (out.left, out.right)),
}


class Heads(nn.Module):
    """Two heads on one trunk, packed in some container."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self.pack = pack
        self.trunk, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        filled(self)

    def forward(self, rows: torch.Tensor) -> Any:
        hidden = torch.tanh(self.trunk(rows))
        return self.pack(self.a(hidden), self.b(hidden))


@pytest.mark.parametrize(
    ("container", "options"),
    cases(
        list(CONTAINERS),
        [{}, {"find_unused_parameters": True}, {"static_graph": True}],
        everyday=lambda container, options: not options or container == "nested",
    ),
)
def test_container(container: str, options: dict[str, bool]) -> None:
    if ON_TORCH and options and container in ("plain object", "dataclass"):
        pytest.skip("torch finds no tensor in it, and leaves gradients local")
    pack, unpack = CONTAINERS[container]

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        left, right = unpack(model(rows))
        return (left * right.sin()).square().mean()

    twin = Twin(Heads(pack), **options)
    for step in range(3):
        twin.step(make_rows(step), loss)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_comes_out_as_it_went_in(container: str) -> None:
    twin = Twin(Heads(CONTAINERS[container][0]), find_unused_parameters=True)
    seen, right = twin.parallel(make_rows()), twin.single(make_rows())
    assert type(seen) is type(right)
    if isinstance(right, dict):
        assert list(seen) == list(right)
    if isinstance(right, Both):
        assert seen.note == right.note
    if container == "nested":
        assert seen["n"] == 3
        assert seen["x"][1][0] is None
        assert isinstance(seen["x"][1][1]["y"], Two)


@pytest.mark.parametrize("find", [True] if ON_TORCH else [True, False])
@pytest.mark.parametrize("view", [False, True])
def test_the_loss_may_use_some_of_the_outputs(find: bool, view: bool) -> None:
    """Another one in each step, and on each rank. The head that nobody uses has no gradient."""
    twin = Twin(Heads(lambda a, b: (a, b)), find_unused_parameters=find, gradient_as_bucket_view=view)
    for step, uses in enumerate([(0, 0), (1, 1), (0, 1), (1, 0)]):

        def loss(model: nn.Module, rows: torch.Tensor, rank: int, uses=uses) -> torch.Tensor:
            return model(rows)[uses[rank]].square().mean()

        twin.backward(make_rows(step), loss)
        if ON_TORCH and uses[0] == uses[1]:
            # What forward ran counts as used there: zeros stand where a single process has nothing.
            for model in (twin.single, twin.parallel):
                for param in model.parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        twin.check()
        twin.update()


def test_outputs_that_need_no_gradient() -> None:
    class WithCount(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = filled(nn.Linear(WIDTH, WIDTH))

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
            output = self.layer(rows)
            return output, output.detach().sum(), output.argmax(1), len(rows)

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        output, total, best, count = model(rows)
        assert not total.requires_grad
        assert best.dtype == torch.int64
        assert count == len(rows)
        return output.square().mean()

    twin = Twin(WithCount(), find_unused_parameters=True)
    for step in range(3):
        twin.step(make_rows(step), loss)


def test_inputs_of_any_form() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = filled(nn.Linear(WIDTH, WIDTH))

        def forward(self, parts: dict[str, list[torch.Tensor]], *, scale: float) -> torch.Tensor:
            return self.layer(parts["x"][0]) * scale

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model({"x": [rows]}, scale=2.0).square().mean()

    twin = Twin(Keyed())
    for step in range(2):
        twin.step(make_rows(step), loss)


def test_an_output_may_be_changed_in_place() -> None:
    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows).add_(1).mul_(2).square().mean()

    twin = Twin(filled(nn.Linear(WIDTH, WIDTH)))
    for step in range(2):
        twin.step(make_rows(step), loss)


@weft_only("raises: it goes through outputs of forward only")
def test_a_parameter_used_outside_of_forward() -> None:
    """A regulariser that reads the weights; the layer is not run at all."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        bare: Any = getattr(model, "module", model)
        return model(rows)[0].square().mean() + (bare.b.weight * (rank + 1)).square().sum()

    twin = Twin(Heads(lambda a, b: (a, b)))
    for step in range(2):
        twin.step(make_rows(step), loss)
