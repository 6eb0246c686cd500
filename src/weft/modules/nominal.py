"""Bear torch's names: programs ask with `isinstance` what holds a module, and know torch's classes only.

So do torch's own `get_state_dict`, Accelerate's and transformers' unwrapping, Lightning's strategies. Here,
and nowhere else in weft, torch's data-parallel classes are named. Invariant: nothing of theirs runs. To its
wrapper weft's is a virtual subclass, which inherits nothing. Its FSDPModule can't have such, so it is a base,
behind one that hides every attribute that weft doesn't define.

Private torch names, here only: `DistributedDataParallel._active_ddp_module`, and `STATE_KEY` and the registry
of `torch.distributed._composable.contract`, in which torch's tools look up what was applied to a module.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel  # loaded with torch.nn

T = TypeVar("T", bound=type)

# Of every class, or without effect.
_HARMLESS = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}


class Prepared:
    """A module that is ready to train across ranks."""

    # Accelerate's mark on what it has wrapped itself: `prepare` leaves such a module as it is.
    _is_accelerate_prepared = True


def known_as_wrapper(cls: T) -> T:
    """Let instances of the class be torch's DistributedDataParallel to `isinstance`."""
    DistributedDataParallel.register(cls)
    return cls


def active_wrapper() -> Any:
    """torch's DistributedDataParallel whose forward runs now, in this process; None if none does."""
    return DistributedDataParallel._active_ddp_module


@functools.cache
def sharded_base() -> type | None:
    """torch's FSDPModule in name, without any of its attributes. Loads torch.distributed.fsdp.

    None where another class has been put in its place, as one does that runs torch's tests on weft.
    """
    from torch.distributed.fsdp import FSDPModule

    if not _is_torchs(FSDPModule):
        return None
    hidden = {name: _Hidden(name) for name in vars(FSDPModule) if name not in _HARMLESS}
    return type("FSDPModule", (FSDPModule,), {"__module__": __name__, **hidden})


def load_registry() -> Any:
    """The module with torch's registry of what was applied to which module."""
    return importlib.import_module("torch.distributed._composable.contract")  # a function hides its name


def enter_state(module: nn.Module, state: object) -> None:
    """Let torch's `fully_shard.state(module)` find this. Its own would be of its engine."""
    from torch.distributed.fsdp import fully_shard

    key = getattr(fully_shard, "__wrapped__", None)
    if key is not None:  # it is torch's
        module.__dict__.setdefault(load_registry().STATE_KEY, {})[key] = state


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.")


class _Hidden:
    """An attribute of torch's class that weft's modules don't have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"'{owner.__name__}' object has no attribute '{self._name}'")
