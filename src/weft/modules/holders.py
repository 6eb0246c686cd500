"""Who reduces a module's gradients: a strategy of weft's, or one of torch's, which need not be imported.

Invariant: one strategy holds a parameter. Two that reduce the same gradient read it while the other writes
it, so neither mean is right; whoever comes second must leave the module alone or refuse it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from weft.modules.nominal import load_registry

STATES_KEY = "_weft_states"
# A module belongs to one way of data parallel at most.
EXCLUSIVE = ("replicate", "fully_shard", "replicate_with_fsdp")
# torch's wrappers hold the module inside; its FSDPModule is mixed into the module's own class.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_MIXINS = {"ReplicateModule": "replicate", "FSDPModule": "fully_shard"}
# Where torch keeps what was applied to a module: its own tools look there.
_REGISTRY = "torch.distributed._composable.contract"


def weft_holder(module: nn.Module) -> str | None:
    """The strategy of weft's that was applied to this module; None if none was."""
    states = module.__dict__.get(STATES_KEY, {})
    applied = next((feature for feature in EXCLUSIVE if feature in states), None)
    return applied or getattr(type(module), "_weft_wrapper", None)


def torch_holder(module: nn.Module) -> str | None:
    """The strategy of torch's that was applied to this module; None if none was."""
    if weft_holder(module) is not None:  # its class may bear torch's name, and the registry has an entry
        return None
    found = torch_wrapper(type(module)) or _torch_mixin(type(module))
    return found or next((name for name in _registry_of(module) if name in EXCLUSIVE), None)


def torch_wrapper(kind: type) -> str | None:
    """The name of torch's data-parallel wrapper that this class is; None for any other class."""
    return next((name for name in _torch_names(kind) if name in WRAPPERS), None)


def holder_of(module: nn.Module) -> str | None:
    """Whose strategy was applied to this module, weft's or torch's, by name."""
    ours = weft_holder(module)
    if ours is not None:
        return ours
    theirs = torch_holder(module)
    return None if theirs is None else f"torch's {theirs}"


def held_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in this one, itself included, that a strategy was applied to, with their paths."""
    for path, part in module.named_modules():
        if holder_of(part) is not None:
            yield path, part


def trains(module: nn.Module, path: str, ignored_names: Collection[str]) -> bool:
    """Whether a module, at this path in another, has a parameter that trains and is not ignored there."""
    prefix = f"{path}." if path else ""
    return any(
        param.requires_grad and prefix + name not in ignored_names
        for name, param in module.named_parameters()
    )


def enter_registry(module: nn.Module, feature: str) -> None:
    """Tell torch's own tools what was applied to the module.

    A strategy enters itself under every name: fully_shard of torch's leaves to others what is replicated, and
    replicate what is sharded.
    """
    contract = load_registry() if feature in EXCLUSIVE else sys.modules.get(_REGISTRY)
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
        for name in ("replicate", "fully_shard") if feature in EXCLUSIVE else (feature,):
            registry[name] = contract.RegistryItem()


def _registry_of(module: nn.Module) -> dict[str, Any]:
    contract = sys.modules.get(_REGISTRY)
    return {} if contract is None else module.__dict__.get(contract.REGISTRY_KEY, {})


def _torch_mixin(kind: type) -> str | None:
    return next((_MIXINS[name] for name in _torch_names(kind) if name in _MIXINS), None)


def _torch_names(kind: type) -> Iterator[str]:
    return (cls.__name__ for cls in kind.__mro__ if cls.__module__.startswith("torch."))
