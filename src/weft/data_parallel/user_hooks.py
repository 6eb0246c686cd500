"""The user's post-accumulate-grad hooks, run when the gradient is the mean.

autograd calls such a hook as soon as this rank's gradient is there. An optimizer step in it
would take the local gradient and ranks would drift apart. So in a backward that reduces, the
hooks of reduced parameters wait until the mean is there; in any other backward they run as ever.
They keep their places in the parameter's own dictionary, so that they can be removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ParamHook = Callable[[torch.Tensor], Any]
_LISTENER = "_weft_listens"


class DeferredHook:
    """A user's hook that waits while `is_reducing` says so."""

    def __init__(self, hook: ParamHook, is_reducing: Callable[[], bool]) -> None:
        self.hook = hook
        self.is_reducing = is_reducing

    def __call__(self, param: torch.Tensor) -> None:
        if not self.is_reducing():
            self.hook(param)


def as_listener(hook: ParamHook) -> ParamHook:
    """Mark a hook as weft's own: it is never deferred."""
    setattr(hook, _LISTENER, True)
    return hook


def defer_hooks(param: torch.Tensor, is_reducing: Callable[[], bool]) -> bool:
    """Make the user's hooks of this parameter wait for reductions; whether it has any."""
    hooks: Any = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks is None or len(hooks) < 2:  # one is the reducer's
        return False
    found = False
    for key, hook in hooks.items():
        if not hasattr(hook, _LISTENER):
            found = True
            if not isinstance(hook, DeferredHook):
                hooks[key] = DeferredHook(hook, is_reducing)
    return found


def run_deferred(param: torch.Tensor) -> None:
    """Run the hooks that waited: the parameter's gradient is the mean now."""
    for hook in list(param._post_accumulate_grad_hooks.values()):  # type: ignore[attr-defined]
        if isinstance(hook, DeferredHook):
            hook.hook(param)
