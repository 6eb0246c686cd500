"""Which local norms are summed over which mesh axes. Pure: how tensors lie in, plan out.

A tensor that is sharded over some axes has its whole norm once the norms of its shards are summed (to the
power p) over each of these axes, in any order. Tensors that are sharded over the same axes share a slot: one
number that goes through these sums. So there is one sum an axis, of a vector with one number a slot.

Invariant: ranks that see tensors which lie alike, in the same order, find the same slots and take the same
axes in the same order. Which of the tensors are there on a rank plays no part. An axis is whatever the
caller tells axes apart by. Taking norms and sending them is clip.py's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Axis = TypeVar("Axis")


@dataclass(frozen=True)
class AxisRoles(Generic[Axis]):
    """How a tensor lies on its mesh, by axis. One that is whole on every rank has no axes here."""

    sharded: tuple[Axis, ...] = ()
    partial: tuple[Axis, ...] = ()  # the ranks hold terms of a sum


@dataclass(frozen=True)
class AxisPlan(Generic[Axis]):
    """What is reduced over one axis: tensors, or slots, by index."""

    axis: Axis
    indices: tuple[int, ...]


class Slots(Generic[Axis]):
    """The slots of tensors, given as tensors are seen.

    With `is_each_apart` every tensor has a slot of its own: its norm is wanted, not only that of all.
    """

    def __init__(self, *, is_each_apart: bool = False) -> None:
        self.axes: list[tuple[Axis, ...]] = []  # by slot: those that its tensors are sharded over
        self._is_each_apart = is_each_apart
        self._found: dict[tuple[Axis, ...], int] = {}

    def take(self, sharded: tuple[Axis, ...]) -> int:
        """The slot of a tensor that is sharded over these axes."""
        slot = self._found.get(sharded)
        if slot is None or self._is_each_apart:
            slot = self._found[sharded] = len(self.axes)
            self.axes.append(sharded)
        return slot

    def sums(self) -> tuple[AxisPlan[Axis], ...]:
        """What is summed over which axis, in this order."""
        return plan_axes(self.axes)


def plan_axes(axes_of: Sequence[tuple[Axis, ...]]) -> tuple[AxisPlan[Axis], ...]:
    """Each axis that is there, as it is first seen, with the indices of those that have it."""
    found: dict[Axis, list[int]] = {}
    for index, axes in enumerate(axes_of):
        for axis in axes:
            found.setdefault(axis, []).append(index)
    return tuple(AxisPlan(axis, tuple(indices)) for axis, indices in found.items())
