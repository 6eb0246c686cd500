"""Objects to bytes, and back. Tensors stay outside: they are listed in a table, and the bytes refer to it.

Functions and classes travel by name. Those that have no name at the other end (lambdas, closures, what a
notebook defined) travel by value, which is what cloudpickle is for.

How tensors travel is tensors.py's work; what a peer may name is said in allowed.py.
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
from typing import Any, ClassVar, NoReturn

import cloudpickle
import torch

from weft.errors import RefusedError, UnfitError
from weft.rpc.allowed import Allowed

_PROTOCOL = 5
_set_dispatch_table: Any = vars(pickle.Pickler)["dispatch_table"].__set__
_NO_REDUCERS: Mapping[type, Reducer] = types.MappingProxyType({})
# A spawned process runs the script of its parent as __mp_main__.
_MAIN_NAMES = {"__main__": "__mp_main__", "__mp_main__": "__main__"}

Reducer = Callable[[Any], "tuple[Any, ...] | str"]


class MissingNameError(UnfitError, AttributeError):
    """A message names something that this worker doesn't have."""


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


def pickle_object(obj: object, reducers: Mapping[type, Reducer] = _NO_REDUCERS) -> Pickled:
    """Pickle an object. `reducers` say how objects of these very types are pickled, as `__reduce__` would.

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
            return Pickled(*_dump(obj, pickle.Pickler, table), tensors)
        except (pickle.PicklingError, AttributeError, TypeError):
            tensors.clear()
    # In a notebook this is the first try: its names can be pickled, and mean nothing elsewhere.
    return Pickled(
        *_dump(obj, cloudpickle.Pickler, _Table({**cloudpickle.Pickler.dispatch_table, **table})), tensors
    )


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
    allow: Allowed | None = None,
) -> object:
    """Undo `pickle_object`. Writable buffers are taken over for good, others are copied.

    Raises MissingNameError (an AttributeError) for a name that is not here, RefusedError for what `allow`
    doesn't have, and whatever the classes in it raise.
    """
    unpickler: _Unpickler | _CheckedUnpickler
    own = (
        [bytearray(buffer) if memoryview(buffer).readonly else buffer for buffer in buffers]
        if buffers
        else ()
    )
    if allow is None:
        unpickler = _Unpickler(io.BytesIO(body), buffers=own)
    else:
        unpickler = _CheckedUnpickler(io.BytesIO(body), buffers=own)
        unpickler.allow = allow
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


def find_global(module: str, name: str, allow: Allowed | None) -> Any:
    """What a message names. Raises what `unpickle_object` raises for it."""
    if allow is not None:
        checked = _CheckedUnpickler(io.BytesIO(), ())
        checked.allow, checked.tensors = allow, ()
        return checked.find_class(module, name)
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


# The unpickler that is written in Python. C's has no door where attributes are set.
_PythonUnpickler: Any = pickle._Unpickler


class _CheckedUnpickler(_PythonUnpickler):
    """The same, some times slower, for peers that may use only what is allowed.

    A pickle may set attributes on what it made itself, and on nothing that was there before: it could name an
    allowed class and then replace its methods.
    """

    tensors: Sequence[torch.Tensor]
    allow: Allowed

    def __init__(self, file: io.BytesIO, buffers: Sequence[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._found: dict[int, object] = {}  # by id

    def find_class(self, module: str, name: str) -> Any:
        if type(module) is not str or type(name) is not str:  # `_named` gets what the pickle says
            raise RefusedError(f"a message names {module!r}.{name!r}: names are texts.")
        if module == __name__ and name == "_tensor_at":
            return self.tensors.__getitem__
        if module == __name__ and name == "_named":
            return self.find_class
        self.allow.check_name(module, name)  # before anything is imported
        try:
            found = super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            found = _find_elsewhere(module, name, error)
        self.allow.check_found(found, module, name)
        self._found[id(found)] = found
        return found

    def get_extension(self, code: int) -> NoReturn:
        """Refuse copyreg's numbers for names: they are looked up in a table that all share."""
        raise RefusedError(
            f"a message names something by the number {code}, which this worker doesn't allow."
        )

    def _load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or id(target) in self._found:
            raise RefusedError(f"a message tried to change {target!r}, which it may only use.")
        _PythonUnpickler.load_build(self)

    dispatch: ClassVar[dict[int, Any]] = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: _load_build}


def _find_elsewhere(module: str, name: str, error: AttributeError | ImportError) -> Any:
    """The name in the other main module, if this is about one. Raises if it isn't, or is not there either."""
    other = sys.modules.get(_MAIN_NAMES.get(module, ""))
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
    raise MissingNameError(
        f"{error}. Default RPC pickler does not serialize function code. Ensure that UDFs are defined on "
        f"both caller and callee modules: this worker has no {module}.{name}."
    ) from error
