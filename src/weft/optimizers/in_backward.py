"""Optimizers that parameters carry with them and that step inside backward.

A parameter's gradient is used as soon as it is there, and freed. Under data parallel that is when
it is the mean: hooks of this kind wait for the reduction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: dict[str, Any],
    register_hook: bool = True,
) -> None:
    """Step an optimizer of its own for each parameter when backward has its gradient, and clear that.

    Called again for a parameter it adds a second optimizer; both step, in order. With
    `register_hook=False` nothing steps by itself: whoever reduces the gradients does it.
    """
    for param in params:
        carried: Any = param
        if not hasattr(carried, "_in_backward_optimizers"):
            carried._in_backward_optimizers = []
            carried._optimizer_classes = []
            carried._optimizer_kwargs = []
            carried._steps_in_backward = False
        carried._in_backward_optimizers.append(optimizer_class([param], **optimizer_kwargs))
        carried._optimizer_classes.append(optimizer_class)
        carried._optimizer_kwargs.append(optimizer_kwargs)
        if register_hook and not carried._steps_in_backward:  # the one hook steps them all
            carried._steps_in_backward = True
            param.register_post_accumulate_grad_hook(_step_and_clear)


def _step_and_clear(param: torch.Tensor) -> None:
    carried: Any = param
    for optimizer in carried._in_backward_optimizers:
        optimizer.step()
    param.grad = None


# A gradient hook that steps the optimizers itself keeps data parallel from calling this one.
vars(_step_and_clear)["steps_optimizers"] = True


def get_in_backward_optimizers(module: nn.Module) -> list[Optimizer]:
    """The optimizers that a module's parameters carry, to save their state. Don't step them yourself."""
    return [
        optimizer
        for param in module.parameters()
        for optimizer in getattr(param, "_in_backward_optimizers", ())
    ]
