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


@dataclass(frozen=True)
class NormPlan(Generic[Axis]):
    """The slot of each tensor, and what is summed over which axis, in this order."""

    slots: tuple[int, ...]
    num_slots: int
    sums: tuple[AxisPlan[Axis], ...]


def plan_norm(sharded: Sequence[tuple[Axis, ...]], *, is_each_apart: bool = False) -> NormPlan[Axis]:
    """The sums that give a norm over tensors, from the axes that each is sharded over.

    With `is_each_apart` every tensor has a slot of its own: its norm is wanted, not only that of all.
    """
    found: dict[tuple[object, ...], int] = {}
    axes_of_slot: list[tuple[Axis, ...]] = []
    slots: list[int] = []
    for index, axes in enumerate(sharded):
        key = (index, axes) if is_each_apart else axes
        slot = found.get(key)
        if slot is None:
            slot = found[key] = len(axes_of_slot)
            axes_of_slot.append(axes)
        slots.append(slot)
    return NormPlan(tuple(slots), len(axes_of_slot), plan_axes(axes_of_slot))


def plan_axes(axes_of: Sequence[tuple[Axis, ...]]) -> tuple[AxisPlan[Axis], ...]:
    """Each axis that is there, as it is first seen, with the indices of those that have it."""
    found: dict[Axis, list[int]] = {}
    for index, axes in enumerate(axes_of):
        for axis in axes:
            found.setdefault(axis, []).append(index)
    return tuple(AxisPlan(axis, tuple(indices)) for axis, indices in found.items())
