"""What peers may name in a message, where the user has said so (`allow=`). Pure.

A name in a pickle is code: unpickling imports its module, and calls what it finds. There are two checks,
before and after the name is looked up:

- before, the name itself must be allowed. Nothing is imported for another.
- after, what was found must call an allowed place its home. A module that is allowed has imported others
  ("package.module.os.system"), and a class leads everywhere ("Class.__init__.__globals__").

Allowed are the user's names and all below them, and plain data: containers, numbers, texts, exceptions, what
tensors and parameters are made of. Not numpy's arrays: a pickled dtype can be made to lie about its memory.

What is allowed may be called with any arguments, also while a message is being read.
"""

from __future__ import annotations

import builtins
import pkgutil
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft import errors
from weft.errors import ConfigError, ConfigTypeError, RefusedError

_CONTAINERS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
_PLAIN_NAMES = frozenset(
    [
        *(f"builtins.{name}" for name in (*_CONTAINERS.split(), "Ellipsis", "NotImplemented")),
        *(
            f"{module.__name__}.{name}"
            for module in (builtins, errors)
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, BaseException)
        ),
        *(f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        "decimal.Decimal",
        "fractions.Fraction",
        "uuid.UUID",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
    ]
)
_PLAIN_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class Allowed:
    """The names that peers may use: `names` and what lies below them, and `own`, exactly.

    `own` is what weft's messages are made of.
    """

    def __init__(self, names: Sequence[str], own: Iterable[str] = ()) -> None:
        if isinstance(names, str):
            raise ConfigTypeError(f"RPC options: allow must be a list of names, not the text {names!r}.")
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigError(
                    f"RPC options: allow has {name!r}, which is no name like package.module.function."
                )
        given = [_plain_main(name) for name in names]
        self._names = frozenset(
            [*given, *(home for name in given if (home := _home_of_name(name)) is not None)]
        )
        self._exact = _PLAIN_NAMES | frozenset(own)

    def check_name(self, module: str, name: str) -> None:
        """Raise RefusedError unless a message may name this."""
        full_name = f"{_plain_main(module)}.{name}"
        is_program = "__main__" in full_name.split(".")[1:]  # importing a package's __main__ would run it
        is_known = full_name in self._exact or self._covers(full_name) or _is_torch_value(module, name)
        if is_program or not is_known:
            raise _refusal(f"{module}.{name}")

    def check_found(self, found: object, module: str, name: str) -> None:
        """Raise RefusedError unless what such a name led to is at home in an allowed place."""
        home = home_of(found)
        if isinstance(found, _PLAIN_VALUES) or found is Ellipsis or found is NotImplemented:
            return
        if home is None or not (home in self._exact or self._covers(home)):
            raise _refusal(f"{module}.{name}", home)

    def check_call(self, function: object) -> None:
        """Raise RefusedError unless the user's names let peers call this function."""
        home = home_of(function)
        if home is None or not self._covers(home):
            raise _refusal(home or repr(function))

    def _covers(self, full_name: str) -> bool:
        return any(full_name == name or full_name.startswith(f"{name}.") for name in self._names)


def home_of(found: object) -> str | None:
    """Where a class or a function says it was defined. None for everything else."""
    if isinstance(found, types.MethodDescriptorType):
        return f"{found.__objclass__.__module__}.{found.__qualname__}"
    if isinstance(found, types.BuiltinFunctionType) and getattr(torch, found.__name__, None) is found:
        return f"torch.{found.__name__}"
    # An instance has its class's __module__, but no __qualname__.
    module, qualname = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    return f"{_plain_main(module)}.{qualname}"


def _home_of_name(name: str) -> str | None:
    """Users write torch.nn.Linear, pickle torch.nn.modules.linear.Linear."""
    try:
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if isinstance(found, types.ModuleType) else home_of(found)


def _plain_main(name: str) -> str:
    """A spawned process knows the main module by another name."""
    return name.replace("__mp_main__", "__main__", 1) if name.startswith("__mp_main__") else name


def _is_torch_value(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), _PLAIN_VALUES)


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
