"""Calls and values of a simple form, which most have: tensors, numbers and texts, side by side.

They need no pickle that can hold any object. A function goes by its name, tensors leave their places, and all
the rest goes into the message's index as it is. What has another form is pickling.py's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.rpc.pickling import find_global, name_global

_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None)))
_TENSORS = frozenset((torch.Tensor,))
_TENSORS_AND_PARAMETERS = frozenset((torch.Tensor, nn.Parameter))
_VALUE, _TUPLE = 0, 1  # what it is, where it is no call

# What was lifted, all of it plain data, and the tensors that were taken out. The former is what it is (for a
# call the function's module and name), the values with None in the place of a tensor, the places, and kwargs.
What = int | tuple[str, str]
Lifted = tuple[tuple[What, tuple[Any, ...], tuple[int, ...], Mapping[str, Any]], list[torch.Tensor]]


def lift_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_tracked: bool
) -> Lifted | None:
    """A call of this form; None for one that has another. Tracked parameters travel as plain tensors."""
    name = name_global(func)
    if name is None or (kwargs and not all(type(value) in _ATOMS for value in kwargs.values())):
        return None
    return _lift(name, args, kwargs, is_tracked)


def lift_value(value: object, *, is_tracked: bool) -> Lifted | None:
    """The same for a result."""
    if type(value) is tuple:
        return _lift(_TUPLE, value, {}, is_tracked)
    return _lift(_VALUE, (value,), {}, is_tracked)


def _lift(what: What, values: tuple[Any, ...], kwargs: Mapping[str, Any], is_tracked: bool) -> Lifted | None:
    kinds = _TENSORS_AND_PARAMETERS if is_tracked else _TENSORS
    places: list[int] = []
    for place, value in enumerate(values):
        if type(value) in kinds:
            places.append(place)
        elif type(value) not in _ATOMS:
            return None
    if not places:
        return (what, values, (), kwargs), []
    tensors = [values[place] for place in places]
    if len(tensors) > 1 and len({id(tensor) for tensor in tensors}) < len(tensors):
        return None  # one tensor in two places stays one
    left = list(values)
    for place in places:
        left[place] = None
    return (what, tuple(left), tuple(places), kwargs), tensors


def put_back(
    what: What,
    values: tuple[Any, ...],
    places: Sequence[int],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    find: Callable[[str, str], Any] = find_global,
) -> Any:
    """Undo lifting: put the tensors back. `find` looks a function up, and raises where there is none."""
    if places:
        filled = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        values = tuple(filled)
    if what == _VALUE:
        return values[0]
    if isinstance(what, int):
        return values
    return find(*what), values, kwargs
