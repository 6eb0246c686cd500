"""Names that peers may use in a message to a worker with `allow=`.

A name is looked up only if it is allowed, and the object found must have been defined under an allowed name
too (its home): an allowed module has imported others ("package.module.os.system"), and attributes of a class
lead everywhere ("Class.__init__.__globals__").

Allowed are the user's names and all below them, and plain data (plain_types.py). Nothing is imported for a
peer: listed names are imported when the list is made, and modules below them must be imported already. Names
that begin with two underscores (`__init__`) are allowed only where they are listed in full.

What is allowed may be called with any arguments, also while a message is being read.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from weft.errors import ConfigError, ConfigTypeError, RefusedError, UnfitError
from weft.rpc.plain_types import PLAIN_CLASSES, PLAIN_VALUES

# A spawned process runs the script of its parent as __mp_main__.
MAIN_NAMES = {"__main__": "__mp_main__", "__mp_main__": "__main__"}
_SINGLETONS = {"builtins.Ellipsis": Ellipsis, "builtins.NotImplemented": NotImplemented}
_MISSING = object()


class MissingNameError(UnfitError, AttributeError):
    """A message names something that this worker doesn't have."""


class Found(NamedTuple):
    """The object of a name. `is_users`: it is on the user's list; else it is plain data, or its class."""

    value: Any
    is_users: bool


class Allowed:
    """The names that peers may use: `names`, and what lies below them."""

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str):
            raise ConfigTypeError(f"RPC options: allow must be a list of names, not the text {names!r}.")
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(
                    f"RPC options: allow has {name!r}, which is not a name like package.module.function."
                )
        given = [_plain_main(name) for name in names]
        self._names = frozenset(
            [*given, *(home for name in given if (home := _resolve_home(name)) is not None)]
        )
        self._found: dict[tuple[str, str], Any] = {}  # functions of modules that were looked up before

    def find(self, module: str, name: str) -> Found:
        """Look up a name. Raises RefusedError if it is not allowed, MissingNameError if it does not exist."""
        known = self._found.get((module, name))
        if known is not None and vars(sys.modules.get(module, types)).get(name) is known:
            return Found(known, is_users=True)
        full_name = f"{_plain_main(module)}.{name}"
        if not self._covers(full_name):
            return Found(_find_plain(module, name, full_name), is_users=False)
        value = self._look_up(module, name, full_name)
        home = home_of(value)
        if home is None or not self._covers(home):
            raise _refusal(f"{module}.{name}", home)
        if "." not in name and sys.modules.get(module) is not None:
            self._found[module, name] = value
        return Found(value, is_users=True)

    def check_call(self, function: object) -> None:
        """Raise RefusedError unless the user's names let peers call this function."""
        home = home_of(function)
        if home is None or not self._covers(home):
            raise _refusal(home or f"an object of type {type(function).__qualname__}")

    def check_callable(self, function: object) -> None:
        """The same for the function of a call, which may be an object of an allowed class with `__call__`."""
        is_callable_object = home_of(function) is None and callable(function)
        self.check_call(type(function) if is_callable_object else function)

    def find_method(self, value: object, name: object) -> Any:
        """Look up a method of a value by its name. Raises as `find` does.

        It is looked up in the class that defines it, and checked before it is bound: properties, and other
        descriptors that compute what they give, do not run.
        """
        kind = type(value)
        if type(name) is not str or not name.isidentifier():
            raise RefusedError("a peer may not call a method whose name is not an identifier.")
        if _is_dunder(name) and f"{home_of(kind)}.{name}" not in self._names:
            raise _refusal(f"{home_of(kind)}.{name}")
        for holder in kind.__mro__:
            if name in vars(holder):
                found = vars(holder)[name]
                if not _only_binds(found):
                    raise _refusal(f"{home_of(kind)}.{name}")
                method = found.__get__(value, kind) if hasattr(type(found), "__get__") else found
                self.check_call(method)
                return method
        method = getattr(value, "__dict__", {}).get(name, _MISSING)
        if method is _MISSING:
            raise MissingNameError(f"'{kind.__qualname__}' object has no attribute '{name}'")
        self.check_call(method)
        return method

    def _look_up(self, module: str, name: str, full_name: str) -> Any:
        is_listed = full_name in self._names
        parts = name.split(".")
        if not is_listed and any(_is_dunder(part) for part in parts):
            raise _refusal(f"{module}.{name}")
        homes = [sys.modules.get(module), sys.modules.get(MAIN_NAMES.get(module, ""))]
        modules = [home for home in homes if home is not None]
        if not modules:
            raise RefusedError(
                f"a peer may not use {module}.{name}: {module} is not imported on this worker, and nothing "
                "is imported for a peer. Import it here before init_rpc."
            )
        for home in modules:
            found: Any = vars(home).get(parts[0], _MISSING)
            if found is _MISSING and is_listed:
                found = getattr(home, parts[0], _MISSING)  # by the module's __getattr__
            for part in parts[1:]:
                if found is not _MISSING and not isinstance(found, type):
                    raise _refusal(f"{module}.{name}")
                found = getattr(found, part, _MISSING)
            if found is not _MISSING:
                return found
        raise missing_name(f"module {module!r} has no attribute {name!r}", f"{module}.{name}")

    def _covers(self, full_name: str) -> bool:
        names = self._names
        if full_name in names:
            return True
        end = full_name.rfind(".")
        while end > 0:
            if full_name[:end] in names:
                return True
            end = full_name.rfind(".", 0, end)
        return False


def _only_binds(found: Any) -> bool:
    """Whether to get this attribute of a class from an object binds a function to it and runs nothing.

    True for functions and the like, written in C or in Python; not for properties, cached ones among them,
    nor for descriptors of users' classes.
    """
    if isinstance(found, staticmethod | classmethod) and not _only_binds(cast(Any, found).__func__):
        return False  # a class method of a property runs the property
    if type(found) is functools.singledispatchmethod:
        return _only_binds(cast(Any, found).func)
    getter: Any = getattr(type(found), "__get__", None)
    is_in_c = getter is None or isinstance(getter, types.WrapperDescriptorType)
    return is_in_c and not hasattr(type(found), "__set__")


def missing_name(problem: str, full_name: str) -> MissingNameError:
    """Make the error for a name that does not exist on this worker."""
    return MissingNameError(
        f"{problem}. Default RPC pickler does not serialize function code. Ensure that UDFs are defined on "
        f"both caller and callee modules: this worker has no {full_name}."
    )


def home_of(found: object) -> str | None:
    """The qualified name under which a class or a function was defined; None for other objects."""
    if isinstance(found, types.MethodDescriptorType):
        return f"{found.__objclass__.__module__}.{found.__qualname__}"
    if isinstance(found, types.BuiltinFunctionType) and getattr(torch, found.__name__, None) is found:
        return f"torch.{found.__name__}"
    # An instance has its class's __module__, but no __qualname__.
    module, qualname = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    return f"{_plain_main(module)}.{qualname}"


def _find_plain(module: str, name: str, full_name: str) -> Any:
    kind = PLAIN_CLASSES.get(full_name)
    if kind is not None:
        return kind
    if full_name in _SINGLETONS:
        return _SINGLETONS[full_name]
    value = vars(torch).get(name) if module == "torch" else None
    if isinstance(value, PLAIN_VALUES):
        return value
    raise _refusal(f"{module}.{name}")


def _resolve_home(name: str) -> str | None:
    """The home of a name: users write torch.nn.Linear, pickle torch.nn.modules.linear.Linear."""
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if isinstance(found, types.ModuleType) else home_of(found)


def _is_dunder(name: str) -> bool:
    return name.startswith("__")


def _plain_main(name: str) -> str:
    """The name with `__main__` for `__mp_main__`, which the main module is called in a spawned process."""
    return name.replace("__mp_main__", "__main__", 1) if name.startswith("__mp_main__") else name


def _refusal(name: str, home: str | None = None) -> RefusedError:
    told = f" ({home})" if home is not None and home != name else ""
    if name == "builtins.getattr":
        told = ", which bound methods need: send the function, and its object as an argument"
    elif name.startswith("cloudpickle."):
        told = ", which functions that have no importable name need: send one that has"
    return RefusedError(
        f"a peer may not use {name}{told}. This worker allows only what its option `allow` lists "
        f"(TensorPipeRpcBackendOptions(allow=[...])): add {home or name!r} if peers are to use it."
    )
