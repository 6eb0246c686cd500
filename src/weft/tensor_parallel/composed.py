"""A split linear layer of parts that autograd differentiates as often as one likes: for second derivatives.

linear.py's layer is one node, whose backward is no function of the graph; where a backward is itself
differentiated (create_graph=True), the layer is computed again from these parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial
from torch.nn import functional as nn_functional

from weft.autograd import traced_inside_only
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.crossing import Crossing, cross
from weft.tensor_parallel.opening import open_param

if TYPE_CHECKING:
    from weft.tensor_parallel.linear import LinearCall


def composed_linear(x: torch.Tensor, weight: Any, bias: Any, call: LinearCall) -> torch.Tensor:
    """The same layer of parts that autograd differentiates as often as one likes."""
    axis, lie = call.axis, call.layouts(x.ndim)
    grad = Partial() if call.is_colwise else None
    entry = Crossing(axis, call.given, lie.needed, is_local=True, where=call.where, grad=grad)
    w = open_param(weight, weight.placements[0], axis)
    b = None if bias is None else open_param(bias, bias.placements[0], axis)
    if b is not None and not call.is_colwise:
        b = once_in_sum(b, axis)
    y = nn_functional.linear(cross(x, entry), w, b)
    size = weight.shape[0] if call.is_colwise else None
    return cross(
        y, Crossing(axis, lie.made, lie.wanted, is_local=call.is_local, where=call.where, whole_size=size)
    )


def once_in_sum(bias: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The bias on one rank and zeros on the others, though each has its gradient: the sum has it once."""
    return _AddOnce.apply(bias, axis)  # type: ignore[no-any-return]


class _AddOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return bias.view_as(bias) if axis.rank == 0 else torch.zeros_like(bias)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SeenByAll.apply(grads[0], ctx.axis), None  # type: ignore[return-value]


class _SeenByAll(torch.autograd.Function):
    """A gradient that all ranks have alike: what it is used for counts once in a sum over them."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return grad.view_as(grad)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return once_in_sum(grads[0], ctx.axis), None


def differentiable_backward(
    grad: torch.Tensor, inputs: tuple[Any, ...], needs_grad: tuple[bool, ...], call: LinearCall
) -> tuple[Any, ...]:
    """The gradients of the layer's inputs, as functions of them and of `grad`."""
    x, weight, bias = inputs
    with torch.enable_grad():
        out = composed_linear(x, weight, bias, call)
    wanted = [index for index in range(3) if needs_grad[index] and inputs[index] is not None]
    found = torch.autograd.grad(out, [inputs[index] for index in wanted], grad, create_graph=True)
    by_index: dict[int, Any] = dict(zip(wanted, found, strict=True))
    return by_index.get(0), by_index.get(1), by_index.get(2), None
