"""Optimizers that torch's own `_apply_optimizer_in_backward` has put on parameters.

Its hooks run when this rank's gradient is there, before the reduction: each rank would step with a gradient
of its own, without a word. Here they become post-accumulate-grad hooks, which wait for the mean.

Private names of torch, used here and nowhere else: `param_to_optim_hook_handle_map` of
`torch.distributed.optim.apply_optimizer_in_backward` (the handles of those hooks, by parameter), and
`_in_backward_optimizers` of a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def defer_torch_optimizers(params: Iterable[torch.Tensor]) -> None:
    """Let the optimizers step when the gradient is the mean. Free where torch's function wasn't used."""
    module: Any = sys.modules.get(_MODULE)
    handles: Any = getattr(module, "param_to_optim_hook_handle_map", None)
    if not handles:
        return
    for param in params:
        if param not in handles:
            continue
        for handle in handles.pop(param):
            handle.remove()
        carried: Any = param
        if not getattr(carried, "_steps_in_backward", False):  # one hook steps all that the parameter carries
            carried._steps_in_backward = True
            param.register_post_accumulate_grad_hook(_step_and_clear)


def _step_and_clear(param: torch.Tensor) -> None:
    carried: Any = param
    for optimizer in carried._in_backward_optimizers:
        optimizer.step()
    param.grad = None


# A gradient hook that steps the optimizers itself keeps data parallel from calling this one.
vars(_step_and_clear)["steps_optimizers"] = True
