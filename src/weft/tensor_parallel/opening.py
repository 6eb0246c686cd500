"""Run a module on local tensors: its DTensor parameters are opened while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from weft.autograd import traced_inside_only
from weft.compiler import allow_in_graph, opened_piece, run_at_trace
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.crossing import Crossing, counterpart, cross
from weft.tensor_parallel.gradients import hand_over
from weft.tensors import local_of, make_dtensor, shaped_spec

Change = Callable[[str, torch.Tensor], torch.Tensor]


def open_param(param: Any, grad_layout: Placement, axis: Axis) -> torch.Tensor:
    """What this rank holds of a parameter, for autograd too: its gradient is a DTensor in `grad_layout`."""
    if torch.compiler.is_compiling():
        if grad_layout == param.placements[0] and _let_open_in_graph():
            return opened_piece(param)
        return param.to_local(grad_placements=[grad_layout])  # Dynamo knows DTensor's own way
    return _Open.apply(param, grad_layout, axis)  # type: ignore[no-any-return]


@run_at_trace
def _let_open_in_graph() -> bool:
    allow_in_graph(opened_piece)
    return True


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor, grad_layout: Placement, axis: Axis) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.grad_layout, ctx.axis = param.shape, grad_layout, axis
        local = local_of(param)
        return local.view_as(local)  # autograd writes on what is returned, and that is the parameter's own

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        if not torch.is_grad_enabled():
            spec = shaped_spec(ctx.axis.mesh, (ctx.grad_layout,), ctx.shape, grad.contiguous())
            given = hand_over(grad, spec, ctx.next_functions[0][0], is_ours=False)
            return given, None, None
        return _Close.apply(grad, ctx.shape, ctx.grad_layout, ctx.axis), None, None  # type: ignore[return-value]


class _Close(torch.autograd.Function):
    """A local gradient as a DTensor: what `_Open` does the other way round."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, shape: torch.Size, layout: Placement, axis: Axis
    ) -> torch.Tensor:
        ctx.layout, ctx.axis = layout, axis
        return make_dtensor(grad.detach(), shaped_spec(axis.mesh, (layout,), shape, grad))

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = Crossing(ctx.axis, ctx.layout, counterpart(ctx.layout), True, "second derivative")
        return cross(grads[0], back), None, None, None


@contextmanager
def opened_params(
    module: nn.Module, axis: Axis, grad_layout: Placement | None, change: Change | None = None
) -> Generator[None]:
    """Let the module, and those in it, find local tensors where their parameters on this axis are.

    Gradients come in `grad_layout`, or as the parameter lies. `change(name, local)` may put something else
    in the place of a local tensor.
    """
    taken: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for owner in module.modules():
            for name, param in owner._parameters.items():
                if isinstance(param, DTensor) and param.device_mesh == axis.mesh:
                    taken.append((owner._parameters, name, param))
        for slots, name, param in taken:
            local = open_param(param, param.placements[0] if grad_layout is None else grad_layout, axis)
            slots[name] = local if change is None else change(name, local)
        yield
    finally:
        for slots, name, param in taken:
            slots[name] = param
