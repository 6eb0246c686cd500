"""Find the tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import torch


def find_tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in the value: in lists, tuples, sets, mappings and dataclasses, nested."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        look = _look_into(type(value))
        if look is not None:
            pending += reversed(look(value))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of the value with every tensor changed; the value itself where none is in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(change, part) for part in cast("list[Any]", value)]
    if isinstance(value, tuple):
        parts = [map_tensors(change, part) for part in cast("tuple[Any, ...]", value)]
        return (
            type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        )  # named tuples take each
    if type(value) is dict:
        return {key: map_tensors(change, part) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, dict | UserDict):
        given = copy.copy(cast("dict[Any, Any]", value))  # of its own kind: defaults and the like are kept
        for key, part in given.items():
            given[key] = map_tensors(change, part)
        return given
    if _is_dataclass(value) and any(True for _ in find_tensors(value)):
        changed = copy.copy(value)  # its __init__ is not run again: fields may be frozen, or set by others
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(changed, field.name, map_tensors(change, getattr(value, field.name)))
        return changed
    return value


@lru_cache(4096)
def _look_into(kind: type) -> Callable[[Any], list[Any]] | None:
    """How to get at what values of a type hold; None where that is nothing."""
    if issubclass(kind, Mapping):
        return lambda value: list(value.values())
    if issubclass(kind, list | tuple | set | frozenset):
        return list
    if dataclasses.is_dataclass(kind):
        return lambda value: [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
