"""`async_execution`: a function that returns a future, whose value is the call's result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "_wrapped_async_rpc_function"  # torch's, so that functions marked by its decorator are known here


def async_execution(function: _Function) -> _Function:
    """Say that a function returns a torch.futures.Future, and that callers get the value of it.

    The worker's thread is free while the future is not done. Put @staticmethod or @classmethod outside of it.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, _MARK, wrapper)
    return wrapper  # pyright: ignore[reportReturnType]


def is_async(function: object) -> bool:
    """Whether a function is marked by `async_execution`."""
    return hasattr(function, _MARK)
