"""Objects to bytes, and back. Tensors stay outside: they are listed in a table, and the bytes refer to it.

Functions and classes travel by name. Those that have no name at the other end (lambdas, closures, what a
notebook defined) travel by value, which is what cloudpickle is for.

How tensors travel is tensors.py's work. A worker with `allow=` reads the same bytes with
fenced_unpickler.py, and pickles objects that peers have made: these must not have it import anything.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import cloudpickle
import torch

from weft.errors import RefusedError
from weft.rpc.allowed import MAIN_NAMES, missing_name

_PROTOCOL = 5
_set_dispatch_table: Any = vars(pickle.Pickler)["dispatch_table"].__set__
_NO_REDUCERS: Mapping[type, Reducer] = types.MappingProxyType({})

Reducer = Callable[[Any], "tuple[Any, ...] | str"]


@dataclass(slots=True)
class Pickled:
    """An object as bytes, and what the bytes refer to."""

    body: bytes
    buffers: list[memoryview]
    tensors: list[torch.Tensor]


class _Table(dict[type, Reducer]):
    """How objects are pickled, by type: copyreg's way, where there is no other."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


def pickle_object(
    obj: object, reducers: Mapping[type, Reducer] = _NO_REDUCERS, *, is_fenced: bool = False
) -> Pickled:
    """Pickle an object. `reducers` say how objects of these very types are pickled, as `__reduce__` would.

    `is_fenced`: the object may have been made by a peer; no module is imported for it.

    Raises what pickle raises. A reducer is called once an object; an object's own `__reduce__` may be called
    twice, when it turns out half-way that something has to go by value.
    """
    tensors: list[torch.Tensor] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
        tensors.append(tensor)
        return _tensor_at, (len(tensors) - 1,)

    table = _Table(_REDUCERS)
    table[torch.Tensor] = reduce_tensor
    if reducers:
        table |= {kind: _once_an_object(reducer) for kind, reducer in reducers.items()}
    if _has_file(sys.modules["__main__"]):
        try:
            return Pickled(*_dump(obj, _FencedPickler if is_fenced else pickle.Pickler, table), tensors)
        except (pickle.PicklingError, AttributeError, TypeError):
            tensors.clear()
    # In a notebook this is the first try: its names can be pickled, and mean nothing elsewhere.
    by_value = _FencedCloudPickler if is_fenced else cloudpickle.Pickler
    return Pickled(*_dump(obj, by_value, _Table({**cloudpickle.Pickler.dispatch_table, **table})), tensors)


def _check_imported(obj: Any) -> None:
    """Raise RefusedError for an object for which pickle would import a module.

    Pickle imports the module that an object names as its own: a class that a peer had a listed class make, or
    an object whose `__dict__` has a `__module__` and a `__reduce_ex__` that a peer has chosen.
    """
    module = getattr(obj, "__module__", None)
    if module is None and "__module__" not in getattr(obj, "__dict__", ()):
        return
    if type(module) is not str or module not in sys.modules:
        shown = repr(module[:100]) if type(module) is str else f"a {type(module).__name__}"
        raise RefusedError(
            f"an object of type {type(obj).__qualname__} can't be sent: it names {shown} as its module, "
            "which is not imported on this worker, and nothing is imported for a peer."
        )


class _FencedPickler(pickle.Pickler):
    """Imports nothing."""

    def reducer_override(self, obj: Any) -> Any:
        """Check an object, and leave the rest to pickle."""
        _check_imported(obj)
        return NotImplemented


class _FencedCloudPickler(cloudpickle.Pickler):
    """The same for what travels by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Check an object, and leave the rest to cloudpickle."""
        _check_imported(obj)
        return super().reducer_override(obj)


def _has_file(module: types.ModuleType) -> bool:
    """Whether other workers can have the module too: not so a notebook, or text on standard input."""
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith("<")


def _dump(obj: object, make_pickler: Any, table: Mapping[type, Reducer]) -> tuple[bytes, list[memoryview]]:
    file = io.BytesIO()
    buffers: list[memoryview] = []
    # Read-only, so that whoever gets them without a journey in between copies them.
    pickler = make_pickler(
        file, _PROTOCOL, buffer_callback=lambda buffer: buffers.append(buffer.raw().toreadonly())
    )
    # cloudpickle's class has an attribute of this name, which stands before pickle's own on the instance.
    _set_dispatch_table(pickler, table)
    pickler.dump(obj)
    return file.getvalue(), buffers


def _once_an_object(reducer: Reducer) -> Reducer:
    reduced: dict[int, tuple[object, tuple[Any, ...] | str]] = {}

    def reduce(obj: object) -> tuple[Any, ...] | str:
        known = reduced.get(id(obj))
        if known is None:
            known = reduced[id(obj)] = obj, reducer(obj)  # held, so that its id stays its own
        return known[1]

    return reduce


def unpickle_object(
    body: bytes | memoryview,
    buffers: Sequence[bytes | memoryview],
    tensors: Sequence[torch.Tensor],
) -> object:
    """Undo `pickle_object`. Writable buffers are taken over for good, others are copied.

    Raises MissingNameError (an AttributeError) for a name that is not here, and whatever the classes in it
    raise.
    """
    own = (
        [bytearray(buffer) if memoryview(buffer).readonly else buffer for buffer in buffers]
        if buffers
        else ()
    )
    unpickler = _Unpickler(io.BytesIO(body), buffers=own)
    unpickler.tensors = tensors
    return unpickler.load()


def name_global(function: Any) -> tuple[str, str] | None:
    """The module and the name that other workers find a function by; None where they may not, or are several.

    Only for plain functions and torch's own: what else has a name is pickled.
    """
    kind: type = type(function)
    if kind is types.FunctionType:
        module, name = function.__module__, function.__qualname__
    elif kind is types.BuiltinFunctionType:
        module, name = "torch", function.__name__
    else:
        return None
    is_found = getattr(sys.modules.get(module), name, None) is function
    return (module, name) if is_found and _has_file(sys.modules["__main__"]) else None


def find_global(module: str, name: str) -> Any:
    """What a message names. Raises what `unpickle_object` raises for it."""
    home = sys.modules.get(module)
    found = None if home is None else getattr(home, name, None)
    if found is not None:  # the usual case, and the quickest way
        return found
    unpickler = _Unpickler(io.BytesIO())
    unpickler.tensors = ()
    return unpickler.find_class(module, name)


# What stands in a pickle for a tensor, and for a function that pickle itself would only reach with getattr.
# The unpicklers put their own methods in the place of these two.


def _tensor_at(index: int) -> NoReturn:
    raise RuntimeError(f"tensor {index} of an RPC: this pickle can only be read by weft.rpc.")


def _named(module: str, name: str) -> NoReturn:
    raise RuntimeError(f"{module}.{name}: this pickle can only be read by weft.rpc.")


def _reduce_builtin(function: types.BuiltinFunctionType) -> tuple[Any, ...] | str:
    """torch.add and its like are methods of a class that nobody knows; torch has them by name."""
    name = function.__name__
    if getattr(torch, name, None) is function:
        return _named, ("torch", name)
    return function.__reduce__()


def _reduce_method(method: types.MethodDescriptorType) -> tuple[Any, ...]:
    """Methods of C classes: torch.Tensor.add, dict.get."""
    return _named, (method.__objclass__.__module__, method.__qualname__)


def _reduce_value(value: object) -> tuple[Any, ...]:
    """torch.channels_last and its like: pickle looks through all modules for one that has it."""
    return _named, ("torch", str(value).removeprefix("torch."))


def _reduce_script(function: Any) -> tuple[Any, ...]:
    """A TorchScript function goes by the name it was defined with, as any other does."""
    # A function that was scripted again, as in a notebook's cell, has a number in its name.
    qualified = re.sub(r"\.___torch_mangle_\d+", "", function.qualified_name)
    module, _, name = qualified.removeprefix("__torch__.").rpartition(".")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise pickle.PicklingError(
            f"TorchScript function {function.qualified_name} has no name in its module."
        )
    return _named, (module, name)


_REDUCERS: Mapping[type, Reducer] = {
    torch.jit.ScriptFunction: _reduce_script,
    types.BuiltinFunctionType: _reduce_builtin,
    types.MethodDescriptorType: _reduce_method,
    torch.layout: _reduce_value,
    torch.memory_format: _reduce_value,
    torch.qscheme: _reduce_value,
}


class _Unpickler(pickle.Unpickler):
    """Knows the table of tensors. One for each message, so that messages may be read inside each other."""

    tensors: Sequence[torch.Tensor]  # set after it is made: an __init__ in Python costs half a microsecond

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == __name__:
            if global_name == "_tensor_at":
                return self.tensors.__getitem__
            if global_name == "_named":
                return self.find_class
        try:
            return super().find_class(module_name, global_name)
        except (AttributeError, ImportError) as error:
            return _find_elsewhere(module_name, global_name, error)


def _find_elsewhere(module: str, name: str, error: AttributeError | ImportError) -> Any:
    """The name in the other main module, if this is about one. Raises if it isn't, or is not there either."""
    other = sys.modules.get(MAIN_NAMES.get(module, ""))
    if other is not None:
        found: Any = other
        try:
            for part in name.split("."):
                found = getattr(found, part)
            return found
        except AttributeError:
            pass
    if isinstance(error, ImportError):
        error.add_note(f"A message names {module}.{name}. Modules must be importable on both workers.")
        raise error
    raise missing_name(str(error), f"{module}.{name}") from error
