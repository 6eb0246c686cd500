"""Run an optimizer for each bucket as soon as its mean is there.

Two ways: `_hook_then_optimizer` with one functional optimizer for all parameters (an
object with `step_param(param, grad)`), and `_apply_optim_in_backward_hook` with the optimizers
that parameters carry (see weft.optimizers.apply_optimizer_in_backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.futures import Future

from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.hook_check import check_parameters
from weft.comm_hooks.in_order import launch_in_order
from weft.comm_hooks.mean import launch_mean, settle
from weft.errors import ConfigError

# torch's names, private there and so here.
__all__ = [
    "PerParameterOptimizer",
    "_OptimizerHookState",
    "_apply_optim_in_backward_hook",
    "_hook_then_optimizer",
]


class _OptimizerHookState:
    """A functional optimizer, and which parameters it is for: all unless given."""

    __slots__ = ("functional_optimizer", "params_to_optimize")

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        if not hasattr(functional_optim, "step_param"):
            raise ConfigError(
                f"Class {type(functional_optim)} must implement method step_param. It is called with a "
                "parameter and its gradient."
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize: set[torch.Tensor] | None = None if params is None else set(params)


class PerParameterOptimizer:
    """Any torch optimizer class as a functional one: an instance for each parameter, made when first met."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **defaults: Any) -> None:
        self._make: Callable[[torch.Tensor], torch.optim.Optimizer] = lambda param: optimizer_class(
            [param], **defaults
        )
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Update one parameter with this gradient, and leave its own gradient alone."""
        optimizer = self.optimizers.get(param)
        if optimizer is None:
            optimizer = self.optimizers[param] = self._make(param)
        kept, param.grad = param.grad, grad
        try:
            optimizer.step()
        finally:
            param.grad = kept


def _hook_then_optimizer(hook: GradHook, optimizer_state: _OptimizerHookState) -> GradHook:
    """A hook that also steps the functional optimizer for the bucket's parameters."""
    wanted = optimizer_state.params_to_optimize

    def hook_then_optimizer(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        check_parameters(bucket, "_hook_then_optimizer")
        params, buffer, grads = bucket.parameters(), bucket.buffer(), bucket.gradients()

        def step(mean: Future[Any]) -> torch.Tensor:
            reduced = settle(mean.value(), buffer)
            found = grads if reduced is buffer else [reduced]
            for param, grad in zip(params, found, strict=True):
                if wanted is None or param in wanted:
                    optimizer_state.functional_optimizer.step_param(param, grad)
            return reduced

        return hook(state, bucket).then(step)

    hook_then_optimizer.__name__ = f"{getattr(hook, '__name__', 'hook')}_then_optimizer"
    return hook_then_optimizer


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> GradHook:
    """A hook that takes the mean and steps the optimizers that the bucket's parameters carry.

    The hook's state is the process group. Gradients of those parameters are cleared by whoever
    settles the buckets; with `gradient_is_bucket_view` they lie in the bucket already.
    """

    def apply_optim_in_backward_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        check_parameters(bucket, "_apply_optim_in_backward_hook")
        params, buffer, grads = bucket.parameters(), bucket.buffer(), bucket.gradients()

        def step(mean: Future[Any]) -> torch.Tensor:
            reduced = settle(mean.value(), buffer)
            found = grads if reduced is buffer else [reduced]
            for param, grad in zip(params, found, strict=True):
                optimizers = getattr(param, "_in_backward_optimizers", ())
                if optimizers and not gradient_is_bucket_view:
                    param.grad = grad
                for optimizer in optimizers:
                    optimizer.step()
            return reduced

        group = _group_of(state)
        return launch_in_order(group, buffer, lambda: launch_mean(buffer, group, label=bucket.label)).then(
            step
        )

    # Data parallel modules step carried optimizers themselves, unless their hook does.
    vars(apply_optim_in_backward_hook)["steps_optimizers"] = True
    return apply_optim_in_backward_hook


def _group_of(state: Any) -> torch.distributed.ProcessGroup:
    """torch gives such hooks a weak reference to the DDP module; a group does as well."""
    if isinstance(state, torch.distributed.ProcessGroup):
        return state
    return state().process_group
