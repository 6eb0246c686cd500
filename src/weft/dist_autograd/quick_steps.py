"""Steps of torch's optimizers in fewer operations, with the same state and, up to rounding, the same numbers.

An owner steps for every worker that asks, often for a few rows of a large table: there the number of
operations is what a step costs.

    Adam, AdamW    torch's own fused form, one operation for all parameters, which torch has to be asked for
    SparseAdam     rows are read and written by their numbers, where torch makes sparse tensors of them

The private names of torch that are used for this: an optimizer's `_optimizer_step_pre_hooks` and
`_optimizer_step_post_hooks`, and those for all optimizers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, SparseAdam

_FUSED = (Adam, AdamW)  # not those that take sparse gradients too, which fused forms don't
_FORMS = frozenset(("foreach", "fused", "capturable", "differentiable"))  # whoever names one has chosen
_PLAIN = (Tensor, nn.Parameter)
_everywhere: Any = importlib.import_module("torch.optim.optimizer")  # has the hooks of all optimizers


def with_fused(
    optimizer_class: Callable[..., Any], params: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments for an optimizer, which ask for its fused form where there is one for these parameters.

    For the CPU only: on a GPU torch takes a fast form by itself.
    """
    if optimizer_class not in _FUSED or not _FORMS.isdisjoint(kwargs):
        return kwargs
    is_fit = all(
        type(param) in _PLAIN and param.is_cpu and param.layout is torch.strided and param.is_floating_point()
        for param in params
    )
    return {**kwargs, "fused": True} if is_fit else kwargs


def step_quickly(optim: Any) -> None:
    """Step an optimizer, in weft's form where there is one and nobody would notice."""
    if type(optim) is SparseAdam and not _is_watched(optim) and _step_rows(optim):
        return
    optim.step()


def _is_watched(optim: Any) -> bool:
    """Whether somebody hears of steps: hooks, or a scheduler, which puts itself in front of `step`."""
    return bool(
        "step" in vars(optim)
        or optim._optimizer_step_pre_hooks
        or optim._optimizer_step_post_hooks
        or _everywhere._global_optimizer_pre_hooks
        or _everywhere._global_optimizer_post_hooks
    )


def _step_rows(optim: SparseAdam) -> bool:
    """Step the rows that gradients have; False, with nothing changed, where these are not of that kind."""
    params = [
        (param, group) for group in optim.param_groups for param in group["params"] if param.grad is not None
    ]
    for param, _ in params:
        if type(param) not in _PLAIN or not param.grad.is_sparse or param.grad.sparse_dim() != 1:
            return False
    with torch.no_grad():
        for param, group in params:
            _step_param(param, group, optim.state[param])
    return True


def _step_param(param: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    state["step"] += 1
    assert param.grad is not None
    grad = param.grad.coalesce()  # a row that is there twice would be averaged twice
    rows, values = grad._indices()[0], grad._values()
    if not values.numel():
        return
    if group.get("maximize", False):
        values = -values
    (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    new_mean = mean.index_select(0, rows).lerp_(values, 1 - beta1)
    new_square = square.index_select(0, rows).mul_(beta2).addcmul_(values, values, value=1 - beta2)
    mean.index_copy_(0, rows, new_mean)
    square.index_copy_(0, rows, new_square)
    bias1, bias2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
    rate = float(group["lr"]) * math.sqrt(bias2) / bias1
    param.index_add_(0, rows, new_mean.div_(new_square.sqrt_().add_(group["eps"])), alpha=-rate)
