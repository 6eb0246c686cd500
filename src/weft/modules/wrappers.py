"""Refuse torch's data-parallel wrappers around modules that weft holds.

Such a wrapper and weft would both reduce the gradients. Programs add one by themselves: Accelerate's
`prepare`, transformers' Trainer, Lightning's strategies. torch tells of each submodule that is registered,
which is how a wrapper takes its module; one that was there before weft is found in forward.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from weft.errors import StateError, UnfitError
from weft.modules.holders import held_parts, torch_holder, torch_wrapper, trains, weft_holder
from weft.modules.nominal import active_wrapper

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # on a module: what a wrapper shall leave alone


@functools.cache  # once a process
def watch_wrappers() -> None:
    """From now on, refuse a wrapper of torch's around a module that weft holds."""
    register_module_module_registration_hook(_check_wrapped)


def check_unheld(module: nn.Module, ignored_names: Collection[str]) -> None:
    """Raise where a strategy of torch's holds a module in this one that weft's DDP is to wrap."""
    for path, part in held_parts(module):
        theirs = torch_holder(part)
        if theirs is not None and theirs != "fully_shard" and trains(part, path, ignored_names):
            raise UnfitError(
                f"weft's DistributedDataParallel can't be put around {_place(path, part)}, which torch's "
                f"{theirs} holds: both would reduce its gradients, and no mean would be right. Take torch's "
                "off (its `.module`), or use that alone. weft.replicate leaves such modules to torch."
            )


def check_outside_wrapper(params: Collection[torch.Tensor]) -> None:
    """Raise in the forward of a wrapper of torch's that has these parameters too, which weft reduces."""
    active = active_wrapper()
    if active is None:
        return
    ignored: Collection[str] = active.parameters_to_ignore
    theirs = {id(param) for name, param in active.module.named_parameters() if name not in ignored}
    if any(id(param) in theirs for param in params):
        raise StateError(
            "a module that weft's DistributedDataParallel or replicate holds runs inside torch's "
            "DistributedDataParallel or replicate, which holds the same parameters: both would reduce their "
            "gradients, and no mean would be right. Use one of the two."
        )


def _check_wrapped(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    theirs = torch_wrapper(type(wrapper))
    if theirs is None or module is None:
        return
    for path, part in held_parts(module):
        ours = weft_holder(part)
        if ours is not None and trains(part, path, getattr(module, _IGNORED, ())):
            raise UnfitError(
                f"torch's {theirs} was put around {_place(path, part)}, which weft's {ours} holds: both "
                "would reduce its gradients, and no mean would be right. Use one of the two. A program that "
                "wraps modules by itself leaves alone what weft holds as a whole: apply weft to the module "
                "that the program is given, not to a part of it, or give it the module without weft's."
            )


def _place(path: str, part: nn.Module) -> str:
    name = type(part).__name__
    return f"'{path}' ({name})" if path else name
