"""State that a composable feature ties to a module: `replicate` and `fully_shard` need no wrapper.

A module has at most one state of each feature. It is kept in the module's own dictionary,
so it lives as long as the module and is copied with it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.errors import RefusedError, UnfitError

STATES_KEY = "_weft_states"
# A module belongs to one way of data parallel at most.
_EXCLUSIVE = ("replicate", "fully_shard", "replicate_with_fsdp")
# Where torch keeps what was applied to a module: its own tools look there.
_TORCH_REGISTRY = "torch.distributed._composable.contract"
_numbers = itertools.count()


def attached(module: nn.Module, feature: str) -> Any:
    """The feature's state of this module; None if it has none."""
    return module.__dict__.get(STATES_KEY, {}).get(feature)


def attach(module: nn.Module, feature: str, state: object) -> None:
    """Tie the state to the module. Raises if this feature, or one that excludes it, is there."""
    check_free(module, feature)
    module.__dict__.setdefault(STATES_KEY, {})[feature] = state
    contract = sys.modules.get(_TORCH_REGISTRY)  # not imported by weft; whoever asks it has
    if contract is not None:
        registry = module.__dict__.setdefault(contract.REGISTRY_KEY, {})
        registry[feature.removesuffix("_with_fsdp")] = contract.RegistryItem()


def check_free(module: nn.Module, feature: str) -> None:
    """Raise if the module can't take this feature."""
    name = type(module).__name__
    if attached(module, feature) is not None:
        raise RefusedError(
            f"{feature} was applied to this {name} already. Each distinct composable distributed API can "
            "only be applied to a module once."
        )
    for other in _EXCLUSIVE:
        if other != feature and (attached(module, other) is not None or _is_torchs(module, other)):
            raise UnfitError(
                f"{feature}: {other} was applied to this {name} already, and a module's parameters are "
                f"either copied or sharded. Apply {feature} to other modules, or drop one of the two."
            )


def owners_below(module: nn.Module) -> Iterator[nn.Module]:
    """The modules below this one whose parameters another data-parallel state takes care of."""
    for child in module.modules():
        if child is not module and any(
            attached(child, feature) is not None or _is_torchs(child, feature) for feature in _EXCLUSIVE
        ):
            yield child


def give_class(
    module: nn.Module, methods: type, prefix: str, first: type | None = None, *, has_hooks: bool = True
) -> None:
    """Make the module an instance of its own class and of `methods`, named with the prefix.

    `first` comes before its own class, so that it can stand in for methods of nn.Module. `has_hooks`: what a
    graph of the module has to do lies in hooks around its forward, and shall be in the graph.
    """
    own = type(module)
    is_plain = own._call_impl is nn.Module._call_impl  # type: ignore[attr-defined]
    # One that is compiled already has its own way to be called.
    if has_hooks and is_plain and module._compiled_call_impl is None:  # type: ignore[attr-defined]
        module.__class__ = _make_class(own, methods, prefix, first, _call_impl=_make_call())
    else:  # alike for modules that are alike, so that they share what is compiled for one of them
        module.__class__ = _join_classes(own, methods, prefix, first)


@functools.cache
def _join_classes(own: type, methods: type, prefix: str, first: type | None) -> type:
    return _make_class(own, methods, prefix, first)


def _make_class(own: type, methods: type, prefix: str, first: type | None, **inside: Any) -> type:
    # The own class before an abstract one, which would change the layout of the object.
    bases = (own, methods) if first is None else (first, own, methods)
    known = {"__module__": own.__module__, "_weft_own_class": own}
    return type(f"{prefix}{own.__name__}", bases, {**known, **inside})


def _make_call() -> Callable[..., Any]:
    """nn.Module's `_call_impl` in a frame that Dynamo traces.

    It leaves out those of torch's own files. So torch.compile of a module whose class is the user's would
    make pieces of the hooks that lie around its forward, and find none of them in the graph. The code is the
    module's own (and its copies'), since Dynamo compiles one piece of code for a few modules only.
    """
    code = _call.__code__.replace(co_name=f"call_{next(_numbers)}")
    return types.FunctionType(code, globals(), "_call_impl")


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[attr-defined]


def _is_torchs(module: nn.Module, feature: str) -> bool:
    """Whether torch's own fully_shard holds the module; its class says so."""
    return feature == "fully_shard" and any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
