"""Modules of several ranks under forward-mode AD and vmap: `torch.func.jvp`, `jacfwd`, `forward_ad`, `vmap`.

Inside a transform of torch.func each operation on a tensor is the transform's. What ranks do with parameters
(gather them, free them, agree on the next collective) concerns plain tensors only, so it is done beside the
transforms. Reverse-mode transforms (grad, vjp, jacrev, hessian) keep gradients of parameters to themselves:
no rank could reduce them, so they are refused.

Private names of torch, used here and nowhere else: `_are_functorch_transforms_active`, `_DisableFuncTorch`
and `_dispatch_tls_is_dispatch_key_excluded` of `torch._C`; `get_interpreter_stack`, `TransformType`,
`get_unwrapped`, `is_functorch_wrapped_tensor` and `is_legacy_batchedtensor` of `torch._C._functorch`; and
`forward_ad._current_level`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.errors import UnsupportedError

_functions: Any = torch._C._functorch  # type: ignore[attr-defined]
_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_is_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
_FRONT = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode  # type: ignore[attr-defined]
_AS_THEY_ARE: AbstractContextManager[None] = nullcontext()


def is_transformed() -> bool:
    """Whether forward-mode AD or a transform of torch.func goes on."""
    return _is_active() or forward_ad._current_level >= 0


def beside_transforms(what: str) -> AbstractContextManager[None]:
    """Do what is inside on plain tensors, beside the transforms under way.

    Raises UnsupportedError for a transform under which it can't be right.
    """
    if not _is_active():
        return _AS_THEY_ARE
    known = (_functions.TransformType.Jvp, _functions.TransformType.Vmap)
    for level in _functions.get_interpreter_stack() or ():
        if level.key() not in known:
            raise UnsupportedError(
                f"{what} doesn't work inside torch.func's {level.key().name.lower()} (grad, vjp, jacrev, "
                "hessian and what is made of them): gradients of parameters would not be reduced over ranks. "
                "Use torch.autograd.grad or backward() instead; jvp, jacfwd and vmap work."
            )
    return torch._C._DisableFuncTorch()  # type: ignore[attr-defined]


def are_movable(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors have memory that a collective could move: those of transforms have none."""
    if any(map(_functions.is_legacy_batchedtensor, tensors)):
        return False
    if not _is_active():
        return True
    return _is_excluded(_FRONT) and not any(map(_functions.is_functorch_wrapped_tensor, tensors))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What transforms have wrapped."""
    while _functions.is_functorch_wrapped_tensor(tensor):
        tensor = _functions.get_unwrapped(tensor)
    return tensor
