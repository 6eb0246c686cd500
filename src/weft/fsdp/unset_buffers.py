"""Buffers that `to_empty` leaves without values and that no state dict will set.

A model made on the meta device gets its parameters from a checkpoint; buffers with persistent=False
are not in it, and hold whatever the memory held. They are filled with what no model computes with, and
whoever has them still at the first forward is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.errors import StateError


@dataclass(frozen=True, slots=True)
class UnsetBuffer:
    """A buffer as `to_empty` left it."""

    fqn: str
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int

    def is_unset(self) -> bool:
        """Whether nobody has written to it, or put another in its place."""
        tensor = self.tensor
        if self.owner._buffers.get(self.name) is not tensor or tensor.numel() == 0:
            return False
        filling = _filling(tensor.dtype)
        if filling is None:
            return tensor._version == self.version
        return bool((tensor.isnan() if filling != filling else tensor == filling).all())


def find_meta_buffers(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers on the meta device that no state dict has, with their paths."""
    return list(_meta_buffers(module))


@torch.no_grad()
def fill_unset(places: Sequence[tuple[str, nn.Module, str]]) -> list[UnsetBuffer]:
    """Mark what lies in these places now as without values."""
    unset: list[UnsetBuffer] = []
    for fqn, owner, name in places:
        tensor = owner._buffers.get(name)
        if tensor is None or tensor.is_meta:
            continue
        filling = _filling(tensor.dtype)
        if filling is not None:
            tensor.fill_(filling)
        unset.append(UnsetBuffer(fqn, owner, name, tensor, tensor._version))
    return unset


def check_set(buffers: Sequence[UnsetBuffer]) -> None:
    """Raise if one of them still has no values."""
    names = [buffer.fqn for buffer in buffers if buffer.is_unset()]
    if names:
        raise StateError(
            f"buffers {names} have no values: to_empty made room for them, and they are in no state dict "
            "(persistent=False). Compute them on every rank as their modules' constructors do, with "
            "reset_parameters or the model's own initialization, before the first forward; or take them from "
            "a model that was made on the CPU. zero_() will do for one that is only written to."
        )


def _meta_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                yield (f"{path}.{name}" if path else name), owner, name


def _filling(dtype: torch.dtype) -> float | int | None:
    """A value that no model computes with; None where the dtype has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min
