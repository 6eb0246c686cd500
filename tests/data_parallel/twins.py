"""A data-parallel model beside a bare copy of it: do their gradients agree?

The copy is what a single process would train: it sees the rows of every rank, and its
loss is the mean of the ranks' losses. Ranks compared only with each other, or with
another library, would agree on a mistake too: on never syncing, for example.

A loss is a function of (model, rows, rank), since ranks may take different branches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel.libraries import DistributedDataParallel
from weft.testing.models import fill_parameters

Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
WIDTH = 6
ROUNDINGS = 1e-13  # in float64, of the tensor's largest value: some hundred roundings


def filled(module: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """The module with parameters that are the same on every rank."""
    module = module.to(dtype)
    fill_parameters(module, seed)
    return module


def make_rows(seed: int = 1, per_rank: int = 3, width: int = WIDTH) -> torch.Tensor:
    """The rows of all ranks, the same on each; float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(per_rank * dist.get_world_size(), width, generator=generator, dtype=torch.float64)


def rows_of(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows.chunk(dist.get_world_size())[rank]


def mean_square(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
    return model(rows).square().mean()


def single_loss(model: nn.Module, rows: torch.Tensor, loss: Loss = mean_square) -> torch.Tensor:
    """What a single process minimises: the mean of the ranks' losses."""
    ranks = range(dist.get_world_size())
    losses = [loss(model, rows_of(rows, rank), rank) for rank in ranks]
    return torch.stack(losses).mean()


class Twin:
    """`parallel` is wrapped and gets this rank's rows; `single` is bare and gets all of them."""

    def __init__(
        self, model: nn.Module, wrap: Callable[..., nn.Module] | None = None, **options: Any
    ) -> None:
        self.single: Any = copy.deepcopy(model)
        self.parallel: Any = (wrap or DistributedDataParallel)(model, **options)

    def backward(self, rows: torch.Tensor, loss: Loss = mean_square) -> None:
        """One forward and backward of each."""
        single_loss(self.single, rows, loss).backward()
        rank = dist.get_rank()
        loss(self.parallel, rows_of(rows, rank), rank).backward()

    def check(self, tolerance: float = ROUNDINGS) -> None:
        """Raise AssertionError unless every gradient is the single process's."""
        assert_same_gradients(self.parallel, self.single, tolerance)

    def step(self, rows: torch.Tensor, loss: Loss = mean_square, lr: float = 0.1) -> None:
        """Backward, check, plain SGD, gradients to None."""
        self.backward(rows, loss)
        self.check()
        self.update(lr)

    def update(self, lr: float = 0.1) -> None:
        for model in (self.parallel, self.single):
            torch.optim.SGD(model.parameters(), lr=lr).step()
            model.zero_grad(set_to_none=True)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients by the bare model's names, which begin with no `module.`."""
    return {name.removeprefix("module."): param.grad for name, param in model.named_parameters()}


def assert_same_gradients(parallel: nn.Module, single: nn.Module, tolerance: float = ROUNDINGS) -> None:
    seen, right = gradients_of(parallel), gradients_of(single)
    assert list(seen) == list(right)
    for name, grad in seen.items():
        assert_same_gradient(grad, right[name], name, tolerance)


def assert_same_gradient(
    grad: torch.Tensor | None,
    right: torch.Tensor | None,
    name: str = "gradient",
    tolerance: float = ROUNDINGS,
) -> None:
    """None is like None only; the difference allowed follows the tensor's largest value."""
    assert (grad is None) == (right is None), f"{name}: {describe(grad)} instead of {describe(right)}"
    if grad is None or right is None:
        return
    assert grad.layout == right.layout, name
    assert grad.dtype == right.dtype, name
    assert grad.shape == right.shape, name
    if right.numel() == 0:
        return
    wide = torch.complex128 if grad.is_complex() else torch.float64
    grad, right = grad.to_dense().to(wide), right.to_dense().to(wide)
    apart = (grad - right).abs().max().item()
    allowed = tolerance * right.abs().max().item()
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed"


def refusal_of(action: Callable[[], object]) -> RuntimeError | None:
    """What an action that is either right or refused says, if it is refused."""
    try:
        action()
    except RuntimeError as error:
        return error
    return None


def describe(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else f"a gradient of {list(grad.shape)}"


def all_ranks(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def net(depth: int = 3) -> Any:
    """Layers in a row, filled, float64."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return filled(nn.Sequential(*layers[:-1]))
