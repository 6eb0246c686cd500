"""Carry functions, results and exceptions between the launcher and its ranks.

Functions of a module that a rank can import travel by name, all others (of
`__main__`, a notebook cell, a test module that is on no path, closures, lambdas)
by value, which is what cloudpickle is for. Exceptions that can't travel become
their text.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle

from weft.errors import ConfigError

# cloudpickle's list of modules to send by value is the process's; threads may launch together.
_registry_lock = threading.Lock()


def encode_call(
    fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], *, by_value: bool = False
) -> bytes:
    """Pickle a call for the ranks.

    `by_value` sends all of the function's module by value: it then runs the very
    code that is loaded here, such as a test whose asserts pytest has rewritten.
    Raises ConfigError, before any rank is started, when something can't be pickled.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    with _registry_lock, _pickled_by_value(module if by_value or not _is_importable(module) else None):
        try:
            return cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
        except Exception as error:
            raise ConfigError(
                f"launch: the function {_name_of(fn)} or its arguments can't be pickled, which process-ranks "
                f"need: {type(error).__name__}: {error}. Make what can't be pickled inside the function, "
                f"or use kind='thread'."
            ) from error


def decode_call(call: bytes) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Undo encode_call, in the rank."""
    return pickle.loads(call)


def publish_main(fn: object) -> None:
    """Put what came by value from the launcher's `__main__` into the rank's own.

    User code that pickles by name (all_gather_object, a DataLoader's workers) then finds its classes where
    they say they are. So does torch.compile what functions of `__main__` use: it looks up the globals of a
    function that it inlines in the function's module, imports included.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    namespace: dict[str, Any] = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__globals__", {})
    main = sys.modules["__main__"]
    is_of_main = namespace.get("__name__") == "__main__"
    for name, value in namespace.items():
        if getattr(value, "__module__", None) == "__main__" or (is_of_main and not name.startswith("__")):
            setattr(main, name, value)


def encode_result(result: object, rank: int) -> bytes:
    """Pickle what the function returned; the error says which rank returned what."""
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(result).__qualname__} that can't be pickled, so the launcher "
            f"can't have it: {type(error).__name__}: {error}. Return plain values or tensors (a DTensor's "
            f"full_tensor(), say)."
        ) from error


def decode_result(result: bytes) -> object:
    """Undo encode_result, in the launcher."""
    return pickle.loads(result)


def encode_exception(exception: BaseException) -> bytes | None:
    """Pickle an exception; None when it does not survive the journey.

    It is loaded once here: an exception whose `__init__` wants other arguments
    than its `args` pickles without complaint and fails at the other end.
    """
    try:
        pickled = cloudpickle.dumps(exception)
        return pickled if type(pickle.loads(pickled)) is type(exception) else None
    except Exception:
        return None


def decode_exception(pickled: bytes | None, headline: str) -> BaseException:
    """The rank's exception, or a RuntimeError with its text where it could not travel."""
    if pickled is not None:
        try:
            exception = pickle.loads(pickled)
            if isinstance(exception, BaseException):
                return exception
        except Exception:  # its class can't be imported here: the text has to do
            pass
    return RuntimeError(headline)


def _name_of(fn: object) -> str:
    return f"'{getattr(fn, '__qualname__', repr(fn))}'"


def _is_importable(module: types.ModuleType | None) -> bool:
    """Whether a rank, which gets this process's sys.path, would find the module's very file by its name.

    Asks the finders and not sys.modules: pytest's importlib mode and notebooks' tools put modules there
    which no path leads to. Frozen and built-in modules have no file to find.
    """
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return True
    name, path, origin = "", None, None
    for part in module.__name__.split("."):
        name = f"{name}.{part}".lstrip(".")
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


@contextmanager
def _pickled_by_value(module: types.ModuleType | None) -> Generator[None]:
    # cloudpickle already sends __main__ by value, and refuses to have it registered twice.
    if module is None or module.__name__ == "__main__" or module.__name__ in _registered_names():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _registered_names() -> set[str]:
    registry: Any = cloudpickle.list_registry_pickle_by_value()
    return set(registry)
