"""Optimizers that parameters carry with them, stepped when the reduction is done.

`weft.optimizers.apply_optimizer_in_backward` gives parameters `_in_backward_optimizers` and a hook
that steps them when a gradient is there. Under data parallel that is too early: the gradient is this
rank's alone. So the hook is taken off and the optimizers step after the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.data_parallel.buckets import Member
from weft.data_parallel.reducer import Reducer

Steppers = list[tuple[torch.Tensor, list[torch.optim.Optimizer]]]


def find_optimizers(members: Sequence[Member]) -> Steppers:
    """The optimizers that parameters carry. Their hooks are taken off."""
    found: Steppers = []
    for member in members:
        carried: Any = getattr(member.param, "_in_backward_optimizers", None)
        if not carried:
            continue
        for handle in getattr(member.param, "_optimizer_hook_handles", ()):
            handle.remove()
        found.append((member.param, list(carried)))
    return found


def step_after_reduction(reducer: Reducer, optimizers: Steppers) -> None:
    """Step them whenever gradients have been reduced, and clear those gradients."""

    def step() -> None:
        for param, carried in optimizers:
            if param.grad is None:
                continue
            for optimizer in carried:
                optimizer.step()
            param.grad = None

    reducer.after_settling.append(step)
