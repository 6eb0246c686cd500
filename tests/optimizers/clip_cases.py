"""Gradients where they lie, beside the same gradients as plain tensors in one process.

A `Case` compares what a rank holds after weft's call with its part of what torch's left of the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

from weft.optimizers.clip import clip_grad_norm_
from weft.tensors import make_dtensor, make_parameter, make_spec

EXACT = 1e-12  # roundings of float64: sums over ranks, not over elements


@dataclass
class Case:
    """Parameters where they lie, and the same as whole tensors."""

    params: list[Any] = field(default_factory=list)
    whole: list[torch.Tensor] = field(default_factory=list)
    cuts: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)

    def add_plain(self, grad: torch.Tensor) -> None:
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        self._add(param, grad, lambda whole: whole)

    def add(self, grad: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        """A parameter with this whole gradient. Where that is Partial, the parameter is Replicate."""

        def cut_it(whole: torch.Tensor) -> torch.Tensor:
            return cut(whole, mesh, placements)

        owned = [Replicate() if place.is_partial() else place for place in placements]
        param = make_parameter(
            torch.zeros_like(cut_it(grad)), make_spec(mesh, owned, grad), requires_grad=True
        )
        local = cut_it(grad) * weight_of(mesh, placements)
        param.grad = make_dtensor(local, make_spec(mesh, placements, grad))
        self._add(param, grad, cut_it)

    def _add(
        self, param: torch.Tensor, grad: torch.Tensor, cut_it: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        whole = nn.Parameter(torch.zeros_like(grad))
        whole.grad = grad.clone()
        self.params.append(param)
        self.whole.append(whole)
        self.cuts.append(cut_it)

    def check(self, norm: torch.Tensor, right: torch.Tensor, tolerance: float = EXACT) -> None:
        """Raise unless the norm and every gradient are the single process's."""
        assert type(norm) is torch.Tensor
        assert (norm.dtype, norm.shape) == (right.dtype, right.shape)
        assert norm.item() == pytest.approx(right.item(), rel=tolerance, nan_ok=True)
        for index, (param, whole, cut_it) in enumerate(zip(self.params, self.whole, self.cuts, strict=True)):
            assert whole.grad is not None
            seen = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(
                seen, cut_it(whole.grad), rtol=tolerance, atol=0, equal_nan=True, msg=f"gradient {index}"
            )

    def clip(self, max_norm: float, order: float = 2.0, tolerance: float = EXACT) -> torch.Tensor:
        """Clip here and there, and compare."""
        norm = clip_grad_norm_(self.params, max_norm, norm_type=order)
        right = torch_clip_grad_norm_(self.whole, max_norm, norm_type=order)
        self.check(norm, right, tolerance)
        return norm


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """This rank's part, cut with torch.chunk. A strided shard is one of what the axes to the right left."""
    axes = range(len(placements))
    strided = [axis for axis in axes if isinstance(placements[axis], _StridedShard)]
    part = whole
    for axis in [*(axis for axis in axes if axis not in strided), *strided]:
        if hasattr(placements[axis], "dim"):
            part = chunk(part, mesh.size(axis), placements[axis].dim, mesh.get_local_rank(axis))
    return part.contiguous()


def chunk(tensor: torch.Tensor, num_ranks: int, dim: int, rank: int) -> torch.Tensor:
    pieces = tensor.chunk(num_ranks, dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)


def weight_of(mesh: DeviceMesh, placements: Sequence[Any]) -> float:
    """What a rank's term is of the sum, or of the mean."""
    weight = 1.0
    for axis, place in enumerate(placements):
        if place.is_partial():
            size, rank = mesh.size(axis), mesh.get_local_rank(axis)
            weight *= (rank + 1) / (size * (size + 1) / 2) * (size if place.reduce_op == "avg" else 1)
    return weight


def numbered(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
