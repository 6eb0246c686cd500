"""A sharded gradient is given to its parameter, and the user's hooks of that parameter run.

autograd never sees the sharded parameter, so its hooks are run here: tensor hooks on the gradient before it
is added, post-accumulate hooks after. The private names `_backward_hooks` and `_post_accumulate_grad_hooks`
are used here for that, and by sharding.py, which moves hooks from the parameter as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weft.comm.call import hosted_by
from weft.errors import StateError
from weft.fsdp.param import ShardedParam


def give_gradient(param: ShardedParam, grad: DTensor | None) -> None:
    """Set the parameter's gradient, or add to it. None: it was added already, only hooks are left to run."""
    sharded: Any = param.sharded
    if grad is not None:
        hooks = sharded._backward_hooks
        if hooks:
            for hook in list(hooks.values()):
                with hosted_by("fsdp"):
                    changed = hook(grad)
                grad = grad if changed is None else changed
        if sharded.grad is None:
            sharded.grad = grad
        else:
            _add(param, sharded.grad, grad)
    hooks = sharded._post_accumulate_grad_hooks
    if hooks:
        with torch.enable_grad():  # as autograd runs them; an optimizer says no_grad itself
            for hook in list(hooks.values()):
                with hosted_by("fsdp"):
                    hook(sharded)


def give_all(params: Sequence[ShardedParam], grads: Sequence[DTensor]) -> bool:
    """Set the gradients of all parameters at once, if nothing more is to be done; whether it was."""
    sharded: list[Any] = [param.sharded for param in params]
    for param in sharded:
        if param.grad is not None or param._backward_hooks or param._post_accumulate_grad_hooks:
            return False
    for param, grad in zip(sharded, grads, strict=True):
        param.grad = grad
    return True


def has_tensor_hooks(param: ShardedParam) -> bool:
    """Whether the user wants to see, or change, gradients before they are added."""
    return bool(param.sharded._backward_hooks)


def steps_in_backward(param: ShardedParam) -> bool:
    """Whether the user has a hook on it that runs when its gradient is there: an optimizer, probably."""
    return bool(param.sharded._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def _add(param: ShardedParam, there: Any, more: Any) -> None:
    if not isinstance(there, DTensor):
        raise StateError(
            f"fully_shard: the gradient of {param.name} is a {type(there).__name__}; it must be a DTensor "
            "like the parameter, or None. Set it to None before backward."
        )
    there._local_tensor.add_(more._local_tensor if isinstance(more, DTensor) else more)
