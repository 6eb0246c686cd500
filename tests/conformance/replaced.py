"""Put weft's names in torch's place, and make torch's own engine raise, in this process for good."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NoReturn

from tests.conformance.suites import Suite

# Where torch's modules have the compiled half of their names from.
COMPILED = ("torch._C._distributed_autograd", "torch._C._distributed_rpc")


class TorchEngineUsed(RuntimeError):
    """Something reached for what weft writes itself."""


def install_weft(suite: Suite) -> None:
    """Replace all that the suite replaces. Import torch's tests after it: they copy names."""
    # Resolved first: a name of torch's may be both replaced and forbidden, and what imports a module that
    # will be swapped must find torch's own.
    forbidden = [(name, *find_holder(name)) for name in suite.forbidden]
    swapped = [(importlib.import_module(name), weft_name) for name, weft_name in suite.swapped.items()]
    for name, weft_name in suite.modules.items():
        replace_module(importlib.import_module(name), import_or_none(weft_name))
    for torch_name, weft_name in suite.names.items():
        holder, attribute = find_holder(torch_name)
        module, weft_attribute = weft_name.split(":")
        setattr(holder, attribute, getattr(import_or_none(module), weft_attribute, stub(torch_name)))
    for torch_module, weft_module in swapped:
        swap_module(torch_module, importlib.import_module(weft_module))
    for name, holder, attribute in forbidden:
        setattr(holder, attribute, refusal(name))


def replace_module(torch_module: types.ModuleType, weft_module: types.ModuleType | None) -> None:
    """Replace the module's public names by weft's, or by stubs."""
    for name in public_names(torch_module):
        replacement = getattr(weft_module, name, stub(f"{torch_module.__name__}:{name}"))
        setattr(torch_module, name, replacement)


def swap_module(torch_module: types.ModuleType, weft_module: types.ModuleType) -> None:
    """Put weft's module itself in the place of torch's, with stubs for what it lacks.

    Modules below torch's that weft has no counterpart of stay torch's.
    """
    package = torch_module.__name__
    for name, value in vars(torch_module).items():
        if hasattr(weft_module, name):
            continue
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
        if isinstance(value, types.ModuleType) and home.startswith(f"{package}."):
            setattr(weft_module, name, value)
        elif home and home.startswith((package, *COMPILED)):
            setattr(weft_module, name, stub(f"{package}:{name}"))
    parent, _, name = package.rpartition(".")
    setattr(sys.modules[parent], name, weft_module)
    sys.modules[package] = weft_module


def public_names(module: types.ModuleType) -> list[str]:
    """The public names that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def find_holder(name: str) -> tuple[Any, str]:
    """The object that has "module:a.b" as an attribute, and that attribute's own name."""
    module, path = name.split(":")
    holder: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    assert hasattr(holder, attribute), f"conformance: torch has no {name}"
    return holder, attribute


def import_or_none(name: str) -> types.ModuleType | None:
    """Import a module of weft's; None where weft has none of this name (and only then)."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def stub(torch_name: str) -> type:
    """What stands where weft has nothing: a class, since torch's code may subclass it, that can't be used."""

    def __new__(cls, *args, **kwargs):  # type: ignore[no-untyped-def]  # a hook's annotations are looked at
        raise NotImplementedError(f"weft has no {torch_name}")

    return type(torch_name.rsplit(":", 1)[-1], (), {"__new__": __new__})


def refusal(torch_name: str) -> Any:
    """What stands where torch's own engine begins."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise TorchEngineUsed(f"{torch_name} was used: this test would have passed on torch's own code")

    return refuse
