"""The user's post-accumulate-grad hooks, run when the gradient is the mean.

autograd calls such a hook as soon as this rank's gradient is there. An optimizer step in it
would take the local gradient and ranks would drift apart. So in a backward that reduces, the
hooks of reduced parameters wait until the mean is there; in any other backward they run as ever.
They keep their places in the parameter's own dictionary, so that they can be removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weft.autograd import current_backward, traced_inside_only
from weft.data_parallel.arrivals import arrivals_of
from weft.errors import StateError

ParamHook = Callable[[torch.Tensor], Any]


class DeferredHook:
    """A user's hook that waits while its reducer reduces."""

    def __init__(self, hook: ParamHook, reducer: weakref.ref[Any]) -> None:
        self.hook = hook
        self.reducer = reducer
        self.ran_in: int | None = None  # the number of the last backward in which it didn't wait

    @traced_inside_only
    def __call__(self, param: torch.Tensor) -> None:
        reducer = self.reducer()
        if reducer is None or not reducer.is_reducing():
            self.ran_in = current_backward()
            self.hook(param)


def hooks_of(param: torch.Tensor) -> dict[int, Any]:
    """The dictionary of the parameter's post-accumulate-grad hooks. The one use of that private name."""
    return param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def defer_hooks(param: torch.Tensor, reducer: weakref.ref[Any]) -> bool:
    """Make the user's hooks of this parameter wait for reductions; whether it has any."""
    hooks = hooks_of(param)
    users = [key for key, hook in hooks.items() if arrivals_of(hook) is None]
    for key in users:
        if isinstance(hooks[key], DeferredHook):
            hooks[key].reducer = reducer  # the module may have been wrapped again
        else:
            hooks[key] = DeferredHook(hooks[key], reducer)
    return bool(users)


def defer_all(
    params: Sequence[torch.Tensor], reducer: weakref.ref[Any], arriving: Sequence[torch.Tensor]
) -> set[int]:
    """Make the user's hooks of all parameters wait; those that have any. `arriving` are being told of now."""
    _check_deferrable(arriving)
    return {index for index, param in enumerate(params) if defer_hooks(param, reducer)}


def _check_deferrable(arriving: Sequence[torch.Tensor]) -> None:
    """Raise for a user's hook that can't wait any more: autograd is about to call it for this parameter.

    That is so in a compiled backward that nothing has announced.
    """
    for param in arriving:
        for hook in hooks_of(param).values():
            if arrivals_of(hook) is None and not isinstance(hook, DeferredHook):
                raise StateError(
                    f"a post-accumulate-grad hook ({getattr(hook, '__qualname__', hook)}) was registered "
                    "after its module was compiled, and would see this rank's own gradient. Register it "
                    "before the module's first compiled forward."
                )


def reducers_of(param: torch.Tensor) -> list[Any]:
    """The reducers that listen to this parameter."""
    return list(_other_reducers(param, None))


def is_heard_elsewhere(param: torch.Tensor, reducer: object) -> bool:
    """Whether another reducer listens to this parameter too."""
    return any(True for _ in _other_reducers(param, reducer))


def is_reduced_elsewhere(param: torch.Tensor, reducer: object) -> bool:
    """Whether another reducer is at work on this parameter's gradient now."""
    return any(other.is_reducing() for other in _other_reducers(param, reducer))


def _other_reducers(param: torch.Tensor, reducer: object) -> Iterator[Any]:
    for hook in hooks_of(param).values():
        arrived = arrivals_of(hook)
        look: Any = None if arrived is None else arrived.look()
        if look is not None and look.__self__ is not reducer:
            yield look.__self__


def run_deferred(param: torch.Tensor, backward: int | None, *, has_stepped: bool) -> None:
    """Run the hooks that waited in this backward: the parameter's gradient is the mean now.

    Where the gradient hook has stepped the parameter's optimizers already, they don't step again.
    """
    for hook in list(hooks_of(param).values()):
        if not isinstance(hook, DeferredHook) or (backward is not None and hook.ran_in == backward):
            continue
        if has_stepped and getattr(hook.hook, "steps_optimizers", False):
            param.grad = None
        else:
            hook.hook(param)
