"""A linear layer whose weight is split, with the collective of one gradient behind the making of the other.

Split by output features (colwise) each rank makes some of the outputs from the whole input, so its input's
gradient is a partial sum. Split by input features (rowwise) each makes a partial sum of all outputs from
its part of the input. Backward computes the input's gradient first, starts what brings it to its
layout, and makes the weight's and the bias's while that is under way, if something else than the rank's own
thread moves it (Axis.has_help).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as nn_functional

from weft.autograd import traced_inside_only
from weft.errors import ConfigError
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.composed import differentiable_backward
from weft.tensor_parallel.crossing import (
    as_result,
    close_tensor,
    counted,
    counterpart,
    launch,
    move,
    open_tensor,
    whole_size_of,
)
from weft.tensor_parallel.gradients import hand_over
from weft.tensors import local_of


@dataclass(frozen=True, eq=False)
class CallLayouts:
    """How the tensors of a call lie, for inputs of so many dims, and which of them have to be moved."""

    given: Placement  # a plain input
    needed: Placement  # the input that is multiplied
    made: Placement  # the product
    wanted: Placement  # the output
    grad_given: Placement  # the gradient of a plain output
    grad_needed: Placement  # the gradient of the product
    grad_made: Placement  # the input's gradient, as it is computed
    grad_wanted: Placement  # the gradient of a plain input
    moves_input: bool
    moves_output: bool
    moves_grad_in: bool
    moves_grad_out: bool


class LinearCall:
    """How a split linear layer is called. Made once, asked at every call."""

    def __init__(
        self,
        axis: Axis,
        layouts: tuple[Placement, Placement],
        where: str,
        *,
        is_colwise: bool,
        is_local: bool,
    ) -> None:
        self.axis = axis
        self.given, self.wanted = layouts  # of a plain input, of the output
        self.where = where
        self.is_colwise = is_colwise
        self.is_local = is_local  # whether the output is a plain tensor
        self.has_bias = is_colwise or axis.rank == 0  # a sum over ranks must have the bias once
        self._by_ndim: dict[int, CallLayouts] = {}

    def layouts(self, ndim: int) -> CallLayouts:
        """The layouts for an input of so many dims."""
        if torch.compiler.is_compiling():  # what is traced now would differ from what is traced next
            return self._find_layouts(ndim)
        found = self._by_ndim.get(ndim)
        if found is None:
            found = self._by_ndim[ndim] = self._find_layouts(ndim)
        return found

    def _find_layouts(self, ndim: int) -> CallLayouts:
        last = Shard(ndim - 1)
        needed, made, grad_made = (
            (Replicate(), last, Partial()) if self.is_colwise else (last, Partial(), last)
        )
        given, wanted = counted(self.given, ndim), counted(self.wanted, ndim)
        grad_given, grad_needed, grad_wanted = counterpart(wanted), counterpart(made), counterpart(given)
        return CallLayouts(
            given=given,
            needed=needed,
            made=made,
            wanted=wanted,
            grad_given=grad_given,
            grad_needed=grad_needed,
            grad_made=grad_made,
            grad_wanted=grad_wanted,
            moves_input=given != needed,
            moves_output=made != wanted,
            moves_grad_in=grad_given != grad_needed,
            moves_grad_out=grad_made != grad_wanted,
        )


class SplitLinear(torch.autograd.Function):
    """The layer: `apply(x, weight, bias, call)`, with DTensors as weight and bias, or no bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, call: LinearCall) -> torch.Tensor:
        axis, lie = call.axis, call.layouts(x.ndim)
        local, have, moves = x, lie.given, lie.moves_input
        size: int | None = None
        if isinstance(x, DTensor):
            opened = open_tensor(x, have, axis, call.where)
            local, have, size = opened.local, opened.layout, opened.whole_size
            moves = have != lie.needed
        if moves:
            size = whole_size_of(local, have, size, axis, call.where)
            local = move(local, (have, lie.needed), axis, size)
        w = weight._local_tensor
        b = local_of(bias) if bias is not None and call.has_bias else None
        low = None  # the weight, where it is multiplied in another dtype
        if torch.is_autocast_enabled(local.device.type):
            local, low, b = _cast_for_autocast(local, w, b)
            w = low
        if local.ndim == 0 or local.shape[-1] != w.shape[1]:
            raise _misfit(local, w, call)
        y = nn_functional.linear(_as_matrix(local), w, b)
        if local.ndim != 2:
            y = y.view(*local.shape[:-1], w.shape[0])
        ctx.output_size = None
        if lie.moves_output or not call.is_local:
            ctx.output_size = _whole_size(y, lie.wanted, weight.shape[0])
        if lie.moves_output:
            y = move(y, (lie.made, lie.wanted), axis, weight.shape[0], is_ours=True)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.lie, ctx.params = call, lie, (weight, bias)
        ctx.came = None if local is x else (have, moves)  # for others than plain inputs that stay as they are
        # The input itself is for a second derivative: beside a gathered one it costs one part of it. Of the
        # weight autograd tells whether it was changed since.
        ctx.save_for_backward(x, weight, local, low)
        if call.is_local:
            return as_result(y)
        return close_tensor(y, lie.wanted, ctx.output_size, axis, is_local=False)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None
        x, kept, local, w = ctx.saved_tensors
        weight, bias = ctx.params
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return differentiable_backward(grad, (x, weight, bias), ctx.needs_input_grad, ctx.call)
        if w is None:
            w = kept._local_tensor
        lie: CallLayouts = ctx.lie
        if lie.moves_grad_in or isinstance(grad, DTensor):
            grad = _bring_gradient(grad, lie, ctx.output_size, ctx.call)
        if grad.dtype != w.dtype:
            grad = grad.to(w.dtype)
        g2, x2 = _as_matrix(grad), _as_matrix(local)
        if w.is_complex():
            w, x2 = w.conj(), x2.conj()
        nodes = ctx.next_functions
        grad_x, coming, grad_weight, grad_bias = None, None, None, None
        if needs_x:
            target = _grad_target(ctx, x)
            grad_x = torch.mm(g2, w)
            if local.ndim != 2:
                grad_x = grad_x.view(local.shape)
            if target is not None:
                axis, way = ctx.call.axis, (lie.grad_made, target)
                is_waited = not axis.has_help
                coming = launch(grad_x, way, axis, weight.shape[1], is_ours=True, is_waited=is_waited)
        if needs_weight:
            grad_weight = _give(torch.mm(g2.t(), x2), weight, nodes[1][0])
        if needs_bias:
            grad_bias = _give(g2.sum(0), bias, nodes[2][0])
        if coming is not None:
            grad_x = coming.wait()
        if grad_x is not None and (grad_x.dtype != x.dtype or ctx.came is not None):
            grad_x = _hand_back(grad_x, x, _grad_target(ctx, x) or lie.grad_made, ctx.call.axis)
        return grad_x, grad_weight, grad_bias, None


def _grad_target(ctx: Any, x: torch.Tensor) -> Placement | None:
    """Where the input's gradient is to be moved; None: it stays as it is made.

    A DTensor that wasn't moved takes its gradient as it comes.
    """
    lie: CallLayouts = ctx.lie
    if not isinstance(x, DTensor):
        return lie.grad_wanted if lie.moves_grad_out else None
    have, was_moved = ctx.came
    target = counterpart(have)
    return target if was_moved and target != lie.grad_made else None


def _bring_gradient(
    grad: torch.Tensor, lie: CallLayouts, output_size: int | None, call: LinearCall
) -> torch.Tensor:
    """The output's gradient as the product needs it."""
    have, needed = lie.grad_given, lie.grad_needed
    if isinstance(grad, DTensor):
        arrived = open_tensor(grad, have, call.axis, call.where)
        grad, have, output_size = arrived.local, arrived.layout, arrived.whole_size
    return grad if have == needed else move(grad, (have, needed), call.axis, output_size)


def _hand_back(grad: torch.Tensor, x: torch.Tensor, layout: Placement, axis: Axis) -> torch.Tensor:
    """The input's gradient as the input came: plain, or a DTensor."""
    grad = grad if grad.dtype == x.dtype else grad.to(x.dtype)
    if not isinstance(x, DTensor):
        return grad
    size = x.shape[layout.dim] if isinstance(layout, Shard) else None
    return close_tensor(grad, layout, size, axis, is_local=False)


def _misfit(local: torch.Tensor, weight: torch.Tensor, call: LinearCall) -> ConfigError:
    hint = "its input is whole on every rank" if call.is_colwise else "its input is split as its weight is"
    return ConfigError(
        f"{call.where}: rank {call.axis.rank} of {call.axis.size} got an input of shape {tuple(local.shape)} "
        f"for a weight of which it has {tuple(weight.shape)}: the last dim must be {weight.shape[1]}. Check "
        f"input_layouts ({call.given}; {hint})."
    )


def _whole_size(product: torch.Tensor, wanted: Placement, out_features: int) -> int | None:
    """Of the output, along the dim that it is cut along. Other dims than the last are whole in a product."""
    if not isinstance(wanted, Shard):
        return None
    return out_features if wanted.dim == product.ndim - 1 else product.shape[wanted.dim]


def _cast_for_autocast(x: torch.Tensor, *params: torch.Tensor | None) -> Any:
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        # torch's autocast leaves float64 alone
        tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)
        for tensor in (x, *params)
    )


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _give(local: torch.Tensor, param: Any, node: Any) -> torch.Tensor | None:
    """A gradient to its parameter, in whose layout it is."""
    if local.dtype != param.dtype:
        local = local.to(param.dtype)
    return hand_over(local, param._spec, node, is_ours=True)
