"""A fully sharded model beside a bare copy of it: do their gradients and parameters agree?

The copy is what a single process would train: it sees the rows of every rank, and its
loss is the mean of the ranks' losses. What a rank holds of the sharded model is compared
with its part of the copy's full tensors, cut with torch.chunk here and not by the code
that is tested; so the comparison communicates nothing, and an error in the layout shows.

A loss is a function of (model, rows, rank), since ranks may take different branches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.data_parallel.twins import (
    Loss,
    all_ranks,
    make_rows,
    mean_square,
    rows_of,
    single_loss,
)
from tests.fully_shard.models import by_layer, loss_by_rank

ROUNDINGS = 1e-12  # in float64, of the tensor's largest value: sums over ranks, not over rows


class Twin:
    """`sharded` is fully sharded and gets this rank's rows; `single` is bare and gets all of them."""

    def __init__(self, model: nn.Module, wrap: Callable[..., object] = by_layer, **options: Any) -> None:
        self.single: Any = copy.deepcopy(model)
        wrap(model, **options)
        self.sharded: Any = model
        assert_is_sharded(self.sharded, self.single)
        self.assert_same_parameters(tolerance=0.0)

    def backward(self, rows: torch.Tensor, loss: Loss = mean_square) -> torch.Tensor:
        """One forward and backward of each; this rank's loss."""
        single_loss(self.single, rows, loss).backward()
        rank = dist.get_rank()
        local = loss(self.sharded, rows_of(rows, rank), rank)
        local.backward()
        return local.detach()

    def check(self, tolerance: float = ROUNDINGS) -> None:
        """Raise AssertionError unless every gradient is this rank's part of the single process's."""
        assert_same_gradients(self.sharded, self.single, tolerance)

    def assert_same_parameters(self, tolerance: float = ROUNDINGS) -> None:
        right = dict(self.single.named_parameters())
        seen = dict(self.sharded.named_parameters())
        assert list(seen) == list(right)
        for name, param in seen.items():
            assert_is_shard(param, right[name], name, tolerance)

    def update(self, lr: float = 0.1) -> None:
        """Plain SGD on both, gradients to None."""
        for model in (self.sharded, self.single):
            for param in model.parameters():
                descend(param, lr)

    def step(self, rows: torch.Tensor, loss: Loss = mean_square, lr: float = 0.1) -> None:
        """Backward, check, update, check."""
        self.backward(rows, loss)
        self.check()
        self.update(lr)
        self.assert_same_parameters()

    def train(self, steps: int = 3, loss: Loss = mean_square) -> None:
        for step in range(steps):
            self.step(make_rows(step), loss)


def twin_on_gpu(model: nn.Module, wrap: Callable[..., object] = by_layer, **options: Any) -> Twin:
    return Twin(model.cuda(), wrap, **options)


def rows_on_gpu(seed: int, width: int = 6) -> torch.Tensor:
    return make_rows(seed, width=width).cuda()


def follow(twin: Twin, schedule: Sequence[tuple[str, ...]]) -> None:
    for step, names in enumerate(schedule):
        twin.step(make_rows(step), loss_by_rank(*names))


def descend(param: torch.Tensor, lr: float) -> None:
    """A step of plain SGD on what this rank holds; torch's own is ten times slower on DTensors."""
    with torch.no_grad():
        if param.grad is not None:
            local_of(param).sub_(local_of(param.grad), alpha=lr)
    param.grad = None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, without a copy and without autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def part_of(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What the calling rank should hold of a full tensor that is laid out as `like` is."""
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size, place = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            chunks = full.chunk(size, placement.dim)
            full = chunks[place] if place < len(chunks) else full.narrow(placement.dim, 0, 0)
        else:
            assert placement.is_replicate(), placement
    return full


def assert_same_gradients(sharded: nn.Module, single: nn.Module, tolerance: float = ROUNDINGS) -> None:
    right = {name: param.grad for name, param in single.named_parameters()}
    seen = {name: param.grad for name, param in sharded.named_parameters()}
    assert list(seen) == list(right)
    for name, grad in seen.items():
        wanted = right[name]
        assert (grad is None) == (wanted is None), f"{name}: {describe(grad)}, not {describe(wanted)}"
        if grad is not None and wanted is not None:
            assert_is_shard(grad, wanted, f"gradient of {name}", tolerance)


def assert_is_shard(seen: torch.Tensor, right: torch.Tensor, name: str, tolerance: float = ROUNDINGS) -> None:
    """A DTensor whose local part is this rank's part of `right`, to `tolerance` of its largest value."""
    assert isinstance(seen, DTensor), f"{name}: {type(seen).__name__}"
    assert seen.shape == right.shape, f"{name}: {seen.shape}, not {right.shape}"
    assert seen.dtype == right.dtype, f"{name}: {seen.dtype}, not {right.dtype}"
    local = local_of(seen)
    wanted = part_of(right.detach(), seen).to(local.device)  # the single process may compute elsewhere
    assert local.shape == wanted.shape, f"{name}: this rank holds {local.shape}, not {wanted.shape}"
    if wanted.numel() == 0:
        return
    apart = (local - wanted).abs().max().item()
    allowed = tolerance * right.detach().abs().max().item()
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed"


def assert_is_sharded(model: nn.Module, single: nn.Module) -> None:
    """Every parameter is a DTensor in parts: the ranks of its mesh hold each of its elements once."""
    params = dict(model.named_parameters())
    most = {name: most_elements(param, name) for name, param in params.items()}
    room = sum(most.values()) + 16 * len(most)  # the shards of a group may lie in one buffer
    for name, param in params.items():
        local = local_of(param)
        assert local.numel() <= most[name], f"{name}: this rank holds {local.numel()} of {param.numel()}"
        assert local.untyped_storage().nbytes() <= 8 * room, f"{name}: more is kept than the shards"
    held = sum(local_of(param).numel() / num_copies(param) for param in params.values())
    assert round(sum(all_ranks(held))) == sum(param.numel() for param in single.parameters())


def most_elements(param: nn.Parameter, name: str) -> int:
    """How many elements the first rank holds, which has the most."""
    assert isinstance(param, DTensor), f"{name}: {type(param).__name__}"
    (placement,) = [p for p in param.placements if isinstance(p, Shard)]
    size = param.device_mesh.size() // num_copies(param)
    length = param.shape[placement.dim]
    return -(-length // size) * (param.numel() // max(1, length))


def num_copies(param: DTensor) -> int:
    """How many ranks of the mesh hold the same shard."""
    sizes = param.device_mesh.shape
    return math.prod(n for n, p in zip(sizes, param.placements, strict=True) if not isinstance(p, Shard))


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, which all ranks must ask for together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def describe(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else f"a gradient of {list(grad.shape)}"
