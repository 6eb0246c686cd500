"""Operations as torch hands them to a dispatch mode: the tensors in them, and whom they are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def is_for_dtensor(types: Sequence[type]) -> bool:
    """Whether a DTensor has to answer first: it calls operations on what is inside of it, which come here."""
    return DTensor in types


def is_about_values(types: Sequence[type], inputs: Sequence[torch.Tensor], kwargs: Kwargs) -> bool:
    """Whether this is about tensors of the model, and not about shapes alone, as DTensor asks for."""
    if not all(kind is torch.Tensor or kind is torch.nn.Parameter for kind in types):
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return False
    return not any(tensor.is_meta for tensor in inputs)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:  # type: ignore[reportUnknownVariableType]
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():  # type: ignore[reportUnknownVariableType]
            yield from tensors_in(part)


def with_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(change, part) for part in value)  # type: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {name: with_tensors(change, part) for name, part in value.items()}  # type: ignore[reportUnknownVariableType]
    return value
