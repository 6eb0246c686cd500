"""DTensors at the border: made around local tensors, and opened, without their dispatcher.

A DTensor is a local tensor and a spec, which says how the whole lies on the mesh. Nothing is sent here,
and autograd knows nothing of what is done here.

Private torch names, here only: `TensorMeta`, `DTensor.__new__` without `__init__`, `AsyncCollectiveTensor`.
`DTensorSpec`, `DTensor._spec` and `DTensor._local_tensor` are read by the features as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from weft.tensors.flat import contiguous_strides

# The constructor without `DTensor.__init__`, which does nothing and takes two thirds of the time.
_new_dtensor: Any = DTensor.__new__


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> DTensorSpec:
    """How a tensor with the shape, strides and dtype of `like` lies on the mesh."""
    meta = TensorMeta(like.size(), like.stride(), like.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def shaped_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], local: torch.Tensor
) -> DTensorSpec:
    """How a tensor of this shape lies on the mesh; its dims are ordered in memory as the local one's."""
    size = torch.Size(shape)
    strides = contiguous_strides(size) if local.is_contiguous() else _ordered_strides(size, local.stride())
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(size, strides, local.dtype))


def _ordered_strides(shape: torch.Size, order: Sequence[int]) -> tuple[int, ...]:
    strides, numel = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim] = numel
        numel *= max(1, shape[dim])
    return tuple(strides)


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same placements of a tensor of another dtype."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return spec.shallow_copy_with_tensor_meta(TensorMeta(meta.shape, meta.stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around a local tensor, which is taken as it is. Autograd knows nothing of it."""
    if local.storage_offset() == 0:
        return _new_dtensor(DTensor, local, spec, requires_grad=False)
    # Around nothing first: a wrapper takes over where its tensor lies in memory, and torch then takes it
    # for a tensor that has memory itself (deepcopy does).
    wrapper = _new_dtensor(DTensor, local.new_empty(0), spec, requires_grad=False)
    wrapper._local_tensor = local
    return wrapper


def make_parameter(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """The same as a parameter. nn.Parameter asks the dispatcher of DTensor, which threads can't share."""
    return _as_parameter(make_dtensor(local, spec), requires_grad=requires_grad)


def make_traceable(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """The same for a parameter that compilers see and nobody copies: it says where in memory it lies."""
    made = _new_dtensor(DTensor, local, spec, requires_grad=False)
    return _as_parameter(made, requires_grad=requires_grad)


def _as_parameter(made: Any, *, requires_grad: bool) -> nn.Parameter:
    made.requires_grad_(requires_grad)
    made._is_param = True
    return made


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, detached from the graph; another tensor as it is. It has arrived."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
