"""State that a composable feature ties to a module: `replicate` and `fully_shard` need no wrapper.

A module has at most one state of each feature. It is kept in the module's own dictionary,
so it lives as long as the module and is copied with it.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.errors import RefusedError, UnfitError
from weft.modules.holders import EXCLUSIVE, STATES_KEY, enter_registry, holder_of
from weft.modules.wrappers import watch_wrappers

_numbers = itertools.count()


def attached(module: nn.Module, feature: str) -> Any:
    """The feature's state of this module; None if it has none."""
    return module.__dict__.get(STATES_KEY, {}).get(feature)


def attach(module: nn.Module, feature: str, state: object) -> None:
    """Tie the state to the module. Raises if this feature, or one that excludes it, is there."""
    check_free(module, feature)
    module.__dict__.setdefault(STATES_KEY, {})[feature] = state
    if feature in EXCLUSIVE:
        watch_wrappers()
    enter_registry(module, feature)


def check_free(module: nn.Module, feature: str) -> None:
    """Raise if the module can't take this feature."""
    name = type(module).__name__
    if attached(module, feature) is not None:
        raise RefusedError(
            f"{feature} was applied to this {name} already. Each distinct composable distributed API can "
            "only be applied to a module once."
        )
    other = holder_of(module) if feature in EXCLUSIVE else None
    if other is not None:
        raise UnfitError(
            f"{feature}: {other} was applied to this {name} already, and one strategy takes care of a "
            f"module's parameters. Apply {feature} to other modules, or drop one of the two."
        )


def owners_below(module: nn.Module) -> Iterator[nn.Module]:
    """The modules below this one whose parameters another data-parallel strategy takes care of."""
    for child in module.modules():
        if child is not module and holder_of(child) is not None:
            yield child


def give_class(
    module: nn.Module,
    methods: type,
    prefix: str,
    first: type | None = None,
    *,
    nominal: type | None = None,
    has_hooks: bool = True,
) -> None:
    """Make the module an instance of its own class and of `methods`, named with the prefix.

    `first` comes before its own class, so that it can stand in for methods of nn.Module; `nominal` after all
    others, for `isinstance`. `has_hooks`: what a graph of the module has to do lies in hooks around its
    forward, and shall be in the graph.
    """
    own = type(module)
    is_plain = own._call_impl is nn.Module._call_impl  # type: ignore[attr-defined]
    # One that is compiled already has its own way to be called.
    if has_hooks and is_plain and module._compiled_call_impl is None:  # type: ignore[attr-defined]
        module.__class__ = _make_class(own, methods, prefix, first, nominal, _call_impl=_make_call())
    else:  # alike for modules that are alike, so that they share what is compiled for one of them
        module.__class__ = _join_classes(own, methods, prefix, first, nominal)


@functools.cache
def _join_classes(own: type, methods: type, prefix: str, first: type | None, nominal: type | None) -> type:
    return _make_class(own, methods, prefix, first, nominal)


def _make_class(
    own: type, methods: type, prefix: str, first: type | None, nominal: type | None, **inside: Any
) -> type:
    # The own class before an abstract one, which would change the layout of the object.
    bases = tuple(base for base in (first, own, methods, nominal) if base is not None)
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
