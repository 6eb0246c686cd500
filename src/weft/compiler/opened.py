"""DTensors opened, in graphs too, with gradients that lie as they do.

DTensor's own `to_local` is not for pieces of different sizes: their gradients have other strides than their
parameters, so that autograd copies them. Before torch 2.13 such a copy is whole on every rank, what nobody
has used gets zeros, and there are no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.autograd import traced_inside_only
from weft.tensors import contiguous_strides, local_of


def opened_piece(param: Tensor) -> Tensor:
    """What this rank holds of a DTensor, for autograd too; another tensor as it is.

    In a graph it is a step: Dynamo is not to look into it.
    """
    if not isinstance(param, DTensor):
        return param
    return _Opened.apply(param)  # type: ignore[no-any-return]


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements = param.device_mesh, param.placements
        ctx.shape = param.shape
        local = local_of(param)
        return local.view_as(local)  # autograd writes on what is returned, and that is the parameter's own

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: Tensor | None) -> DTensor | None:
        (grad,) = grads
        if grad is None:
            return None
        grad, strides = grad.contiguous(), contiguous_strides(ctx.shape)
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, shape=ctx.shape, stride=strides)
