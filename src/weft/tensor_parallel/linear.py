"""A linear layer whose weight is split, with the collective of one gradient behind the making of the other.

Split by output features (colwise) each rank makes some of the outputs from the whole input, so its input's
gradient is a partial sum. Split by input features (rowwise) each makes a partial sum of all outputs from
its part of the input. Backward computes the input's gradient first, starts what brings it to its
layout, and makes the weight's and the bias's while that is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn import functional as nn_functional

from weft.errors import ConfigError
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.crossing import (
    Crossing,
    close_tensor,
    counted,
    counterpart,
    cross,
    launch,
    open_tensor,
)
from weft.tensor_parallel.opening import open_param
from weft.tensors import local_of, make_dtensor, with_dtype


@dataclass(frozen=True, eq=False)
class LinearCall:
    """How a split linear layer is called."""

    axis: Axis
    is_colwise: bool
    input_layout: Placement  # of a plain input
    output_layout: Placement
    is_local: bool  # whether the output is a plain tensor
    where: str


def run_linear(x: torch.Tensor, weight: Any, bias: Any, call: LinearCall) -> torch.Tensor:
    """Apply the layer. `weight` and `bias` are DTensors, or there is no bias."""
    return _Linear.apply(x, weight, bias, call)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, call: LinearCall) -> torch.Tensor:
        axis = call.axis
        opened = open_tensor(x, call.input_layout, axis, call.where)
        ndim = opened.local.ndim
        needed = _input_layout(call, ndim)
        size = opened.size_along(axis, call.where) if needed != opened.layout else opened.whole_size
        w, b = local_of(weight), None if bias is None else local_of(bias)
        if not call.is_colwise and axis.rank > 0:
            b = None  # the outputs are summed over ranks: it must be in the sum once
        local = launch(opened.local, opened.layout, needed, axis, size).wait()
        check_width(local, w, call)
        local, w, b = _cast_for_autocast(local, w, b)
        y = nn_functional.linear(local, w, b)
        made = _made_layout(call, ndim)
        want = counted(call.output_layout, ndim)
        out_features = weight.shape[0]
        result = launch(y, made, want, axis, out_features, is_ours=True).wait()
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.opened = (opened.layout, opened.is_plain, x.dtype)
        ctx.is_moved = needed != opened.layout
        ctx.output_size = _size_along(want, y, made, out_features)
        # The inputs themselves are for a second derivative, and hold no memory that isn't held anyway.
        ctx.save_for_backward(x, weight, bias, local, w if w.dtype != weight.dtype else None)
        return close_tensor(result, want, ctx.output_size, axis, is_local=call.is_local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        x, weight, bias, local, w = ctx.saved_tensors
        call: LinearCall = ctx.call
        if torch.is_grad_enabled():
            return _differentiable_backward(grad, (x, weight, bias), ctx.needs_input_grad, call)
        w = local_of(weight) if w is None else w
        axis, ndim = call.axis, local.ndim
        arrived = open_tensor(
            grad, counterpart(counted(call.output_layout, ndim)), axis, call.where, ctx.output_size
        )
        needed = counterpart(_made_layout(call, ndim))
        g = launch(arrived.local, arrived.layout, needed, axis, arrived.whole_size).wait().to(w.dtype)
        g2, x2 = g.reshape(-1, g.shape[-1]), local.reshape(-1, local.shape[-1])
        layout, is_plain, dtype = ctx.opened
        made = Partial() if call.is_colwise else Shard(ndim - 1)
        target = counterpart(layout) if is_plain or ctx.is_moved else made
        coming, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            made_here = (g2 @ w).view(*g.shape[:-1], w.shape[1])
            coming = launch(made_here, made, target, axis, weight.shape[1], is_ours=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _wrap(g2.t() @ x2, weight)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = _wrap(g2.sum(0), bias)
        grad_x = None
        if coming is not None:
            size = x.shape[target.dim] if isinstance(target, Shard) and not is_plain else None
            grad_x = close_tensor(coming.wait().to(dtype), target, size, axis, is_local=is_plain)
        return grad_x, grad_weight, grad_bias, None


def check_width(local: torch.Tensor, weight: torch.Tensor, call: LinearCall) -> None:
    """Raise for an input that isn't as wide as this rank's part of the weight."""
    if local.shape[-1] == weight.shape[1]:
        return
    hint = "its input is whole on every rank" if call.is_colwise else "its input is split as its weight is"
    raise ConfigError(
        f"{call.where}: rank {call.axis.rank} of {call.axis.size} got an input of shape {tuple(local.shape)} "
        f"for a weight of which it has {tuple(weight.shape)}: the last dim must be {weight.shape[1]}. Check "
        f"input_layouts ({call.input_layout}; {hint})."
    )


def _input_layout(call: LinearCall, ndim: int) -> Placement:
    return Replicate() if call.is_colwise else Shard(ndim - 1)


def _made_layout(call: LinearCall, ndim: int) -> Placement:
    """How the product lies."""
    return Shard(ndim - 1) if call.is_colwise else Partial()


def _size_along(want: Placement, y: torch.Tensor, made: Placement, out_features: int) -> int | None:
    if not isinstance(want, Shard):
        return None
    return out_features if want == made or want.dim == y.ndim - 1 else y.shape[want.dim]


def _cast_for_autocast(*tensors: torch.Tensor | None) -> Any:
    device = tensors[0].device.type  # type: ignore[union-attr]
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _wrap(local: torch.Tensor, param: Any) -> torch.Tensor:
    """A gradient as its parameter lies."""
    return make_dtensor(local.to(param.dtype), with_dtype(param._spec, param.dtype))


def composed_linear(x: torch.Tensor, weight: Any, bias: Any, call: LinearCall) -> torch.Tensor:
    """The same layer of parts that autograd differentiates as often as one likes."""
    axis, ndim = call.axis, x.ndim
    needed, made = _input_layout(call, ndim), _made_layout(call, ndim)
    entry = Crossing(
        axis, call.input_layout, needed, True, call.where, grad=Partial() if call.is_colwise else None
    )
    w = open_param(weight, weight.placements[0], axis)
    b = None if bias is None else open_param(bias, bias.placements[0], axis)
    if b is not None and not call.is_colwise:
        b = once_in_sum(b, axis)
    y = nn_functional.linear(cross(x, entry), w, b)
    size = weight.shape[0] if call.is_colwise else None
    exit_ = Crossing(axis, made, call.output_layout, call.is_local, call.where, whole_size=size)
    return cross(y, exit_)


def once_in_sum(bias: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The bias on one rank and zeros on the others, though each has its gradient: the sum has it once."""
    return bias if axis.rank == 0 else bias - bias.detach()


def _differentiable_backward(
    grad: torch.Tensor, inputs: tuple[Any, ...], needs_grad: tuple[bool, ...], call: LinearCall
) -> tuple[Any, ...]:
    x, weight, bias = inputs
    with torch.enable_grad():
        out = composed_linear(x, weight, bias, call)
    wanted = [index for index in range(3) if needs_grad[index] and inputs[index] is not None]
    found = torch.autograd.grad(out, [inputs[index] for index in wanted], grad, create_graph=True)
    by_index: dict[int, Any] = dict(zip(wanted, found, strict=True))
    return by_index.get(0), by_index.get(1), by_index.get(2), None
