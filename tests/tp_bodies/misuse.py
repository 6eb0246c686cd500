"""What users may get wrong: each is refused by name, where it would be wrong in silence, or fatal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.tp_bodies.twins import assert_close, filled, make_mesh, numbers, part_of


def inputs_of_the_wrong_kind(tp: Any) -> None:
    """Each is refused by name, before anything is sent."""
    mesh = make_mesh()
    embedding = tp.parallelize_module(
        filled(nn.Embedding(6, 4)), mesh, tp.RowwiseParallel(input_layouts=Replicate())
    )
    for ids in (torch.rand(3), torch.tensor([True, False])):
        with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
            embedding(ids)
    with pytest.raises(IndexError, match="index out of range in self: 6, of 6 rows"):
        embedding(torch.tensor([1, 6]))
    linear = tp.parallelize_module(filled(nn.Linear(4, 4)), mesh, tp.ColwiseParallel())
    with pytest.raises(ValueError, match=r"rank \d of 2 got an input of shape"):
        linear(torch.tensor(1.0, dtype=torch.float64))


def modules_that_cannot_be(tp: Any) -> None:
    """A forward on the instance would run in the style's place; batch norm would see a part only."""
    linear = nn.Linear(4, 4)
    linear.forward = lambda rows: rows  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a forward of its own on the instance"):
        tp.parallelize_module(linear, make_mesh(), tp.ColwiseParallel())
    assert not isinstance(linear.weight, DTensor)
    with pytest.raises(NotImplementedError, match="drift apart"):
        tp.parallelize_module(nn.Sequential(nn.BatchNorm1d(4)), make_mesh(), tp.SequenceParallel())


class Scaled(nn.Module):
    """A norm with a scale from outside."""

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rows * scale


def plain_parameters_as_inputs(tp: Any) -> None:
    """A plain parameter beside a part would get a part of its gradient; a DTensor gets an addend."""
    mesh = make_mesh()
    module = tp.parallelize_module(Scaled(), mesh, tp.SequenceParallel(use_local_output=True))
    rows = numbers(4, 6, 8)
    mine = part_of(rows, Shard(1), mesh)
    with pytest.raises(ValueError, match="a plain parameter of shape"):
        module(mine, nn.Parameter(torch.ones(8, dtype=rows.dtype)))
    scale = nn.Parameter(distribute_tensor(torch.ones(8, dtype=rows.dtype), mesh, [Replicate()]))
    module(mine, scale).square().sum().backward()
    single = torch.ones(8, dtype=rows.dtype, requires_grad=True)
    (rows * single).square().sum().backward()
    assert_close(scale.grad.full_tensor(), single.grad, "gradient of the scale")


def batched_gradients(tp: Any) -> None:
    """vmap's tensors have no memory to move: an error, where the process once died."""
    linear = tp.parallelize_module(filled(nn.Linear(4, 4)), make_mesh(), tp.ColwiseParallel())
    rows = numbers(2, 4).requires_grad_()
    output = linear(rows)
    every = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
    with pytest.raises(RuntimeError, match="Loop instead"):
        torch.autograd.grad(output, rows, every, is_grads_batched=True)


BODIES: list[Callable[..., None]] = [
    inputs_of_the_wrong_kind,
    modules_that_cannot_be,
    plain_parameters_as_inputs,
    batched_gradients,
]
