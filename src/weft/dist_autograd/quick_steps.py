"""Steps of torch's optimizers in fewer operations, with the same state and, up to rounding, the same numbers.

An owner steps for every worker that asks, often for a few rows of a large table: there the number of
operations is what a step costs.

    Adam, AdamW    torch's own fused operation, one for all parameters of a group
    SparseAdam     the same operation, on copies of the rows that have gradients

What is of another kind than the code below takes is left to the optimizer's own `step`. Before a step of
torch's with `fused=True`, gradients and states are given their parameter's strides: those kernels walk all of
them from the first element on, and read and write beyond tensors that lie otherwise. Gradients of remote
calls may be expanded (that of a sum is), and states and parameters are a peer's to choose.

The private names of torch that are used for this: Adam's `_init_group`, `_fused_adam_` and `_fused_adamw_`;
an optimizer's `_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`, and those for all optimizers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam

from weft.errors import ConfigError
from weft.tensors import dense_strides

_PLAIN = (Tensor, nn.Parameter)
_HAVE_FUSED = (SGD, Adam, Adagrad)  # AdamW is an Adam
_DTYPES = (torch.float32, torch.float64)  # for others torch's operation computes in another dtype
_everywhere: Any = importlib.import_module("torch.optim.optimizer")  # has the hooks of all optimizers


def step_quickly(optim: Any) -> None:
    """Step an optimizer, in weft's form where there is one and nobody would notice."""
    quick_step = _QUICK_STEPS.get(type(optim))
    if quick_step is None or _is_watched(optim) or not quick_step(optim):
        if isinstance(optim, _HAVE_FUSED):
            _lay_out_for_fused(optim)
        optim.step()


def _lay_out_for_fused(optim: Any) -> None:
    """Give gradients and states the strides of their parameters. Raises ConfigError where that can't be."""
    params = [param for group in optim.param_groups if group.get("fused") for param in group["params"]]
    for param in params:
        grad = param.grad
        if grad is None or grad.layout is not torch.strided:
            continue  # torch refuses sparse ones itself
        if param.numel() and dense_strides(param.shape, param.stride()) != param.stride():
            raise ConfigError(
                f"fused=True: a parameter of shape {tuple(param.shape)} has strides {param.stride()}; its "
                "elements must lie side by side, each in a place of its own. Leave fused out."
            )
        if grad.stride() != param.stride():
            param.grad = _laid_out_as(param, grad)
        state = optim.state.get(param, {})
        for name, value in state.items():
            if name == "step" or not isinstance(value, Tensor):
                continue
            if value.shape != param.shape or value.layout is not torch.strided:
                raise ConfigError(
                    f"fused=True: the state '{name}' of a parameter of shape {tuple(param.shape)} has shape "
                    f"{tuple(value.shape)} and layout {value.layout}. Load a state that fits."
                )
            if value.stride() != param.stride():
                state[name] = _laid_out_as(param, value)


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies as the parameter does."""
    with torch.no_grad():
        return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


def _is_watched(optim: Any) -> bool:
    """Whether somebody hears of steps: hooks, a profile, or a scheduler, which puts itself before `step`."""
    return bool(
        "step" in vars(optim)
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or optim._optimizer_step_pre_hooks
        or optim._optimizer_step_post_hooks
        or _everywhere._global_optimizer_pre_hooks
        or _everywhere._global_optimizer_post_hooks
    )


def _are_alike(param: Tensor, *others: Tensor) -> bool:
    """Whether tensors lie side by side in the same order, so that each can be walked from its start."""
    dtype, shape = param.dtype, param.shape
    if type(param) not in _PLAIN or not param.is_cpu or dtype not in _DTYPES or not param.is_contiguous():
        return False
    for other in others:
        if other.dtype is not dtype or not other.is_cpu or other.shape != shape or not other.is_contiguous():
            return False
    return True


def _step_fused(optim: Any) -> bool:
    """Step Adam's parameters at once; False, with none stepped, where torch's operation is not for them."""
    groups: list[tuple[Mapping[str, Any], list[list[Tensor]]]] = []
    for group in optim.param_groups:
        if not _is_usual(group):
            return False
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        optim._init_group(group, *lists)
        params, grads, means, squares, largest, _ = lists
        if len(set(params)) < len(params):
            return False  # it has a step for each time that a parameter was given
        others = zip(grads, means, squares, *([largest] if group["amsgrad"] else []), strict=True)
        if not all(_are_alike(param, *each) for param, each in zip(params, others, strict=True)):
            return False
        groups.append((group, lists))
    with torch.no_grad():
        for group, lists in groups:
            if lists[0]:
                _step_group(group, lists)
    return True


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Whether nobody has chosen how a group is stepped, and its settings are plain numbers."""
    if group["foreach"] is not None or group["fused"] is not None:
        return False
    if group["capturable"] or group["differentiable"]:
        return False
    settings = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    return all(isinstance(setting, (float, int)) for setting in settings)


def _step_group(group: Mapping[str, Any], lists: list[list[Tensor]]) -> None:
    operations: Any = torch
    operations._foreach_add_(lists[5], 1)
    beta1, beta2 = group["betas"]
    is_decoupled = group.get("decoupled_weight_decay", False)
    step = operations._fused_adamw_ if is_decoupled else operations._fused_adam_
    step(
        *lists,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _step_rows(optim: Any) -> bool:
    """Step the rows that gradients have; False, with no parameter changed, where these are of other kinds."""
    params = [
        (param, group) for group in optim.param_groups for param in group["params"] if param.grad is not None
    ]
    if not all(_has_rows(param, optim.state.get(param, {})) for param, _ in params):
        return False
    with torch.no_grad():
        for param, group in params:  # one after the other: they may share memory
            _step_param(param, group, optim.state[param])
    return True


def _has_rows(param: Tensor, state: Mapping[str, Any]) -> bool:
    grad = param.grad
    return (
        grad is not None
        and grad.is_sparse
        and grad.sparse_dim() == 1
        and grad.dtype is param.dtype
        and _are_alike(param, *(state[name] for name in _MEANS if state))
    )


def _step_param(param: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
    state["step"] += 1
    assert param.grad is not None
    grad = param.grad.coalesce()  # a row that is there twice would be averaged twice
    numbers, values = grad._indices()[0], grad._values()
    if not values.numel():
        return
    wholes = (param, *(state[name] for name in _MEANS))
    rows = [whole.index_select(0, numbers) for whole in wholes]
    operations: Any = torch
    beta1, beta2 = group["betas"]
    operations._fused_adam_(
        *([piece] for piece in (rows[0], values.contiguous(), *rows[1:])),
        [],
        [torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        # Adam corrects the squares and then adds eps; SparseAdam corrects what has it added.
        eps=group["eps"] / math.sqrt(1 - beta2 ** state["step"]),
        amsgrad=False,
        maximize=group.get("maximize", False),
    )
    for whole, stepped in zip(wholes, rows, strict=True):
        whole.index_copy_(0, numbers, stepped)


_MEANS = ("exp_avg", "exp_avg_sq")
_QUICK_STEPS = {Adam: _step_fused, AdamW: _step_fused, SparseAdam: _step_rows}
