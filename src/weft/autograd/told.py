"""Tensors that tell when backward comes to them, also under forward-mode AD and vmap.

A hook of a tensor would know neither of its tangent nor of what transforms of torch.func unwrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.autograd.frames import traced_inside_only


def told_of_backward(tensor: torch.Tensor, tell: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """The tensor again, which calls `tell` with its gradient before backward goes on to what made it.

    So does its tangent.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _Told.apply(tell, tensor)  # type: ignore[no-untyped-call]


class _Told(torch.autograd.Function):
    """Passes a tensor on, and its tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tell: Any, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.tell = inputs[0]

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.tell(grads[0])
        return None, grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None if tangents[1] is None else _Told.apply(ctx.tell, tangents[1])  # type: ignore[no-untyped-call]
