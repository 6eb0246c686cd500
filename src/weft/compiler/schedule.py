"""What a compiled backward is told about gradients: in which buckets they go, and over which wire. Pure.

The owner of gradients (a replicated module's reducer) says these; passes only follow. All of it is in the
graph as constants, so that a graph that comes from Inductor's cache says the same.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Wire:
    """How gradients travel: the mean over a group, in their own dtype or in a narrower one."""

    owner: int  # whose gradients they are: graphs of one owner are not another's
    group: str  # its name, by which graphs find it
    size: int
    dtype: torch.dtype | None = None  # narrower than the gradients'; None: their own
    plan: str = ""  # a fingerprint: another plan is another graph
    has_marks: bool = True  # buckets carry marks behind the gradients
    is_plain: bool = True  # it is this mean and nothing else; no hook of the user's

    def encode(self) -> str:
        """As a constant of the graph."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return json.dumps(
            [self.owner, self.group, self.size, dtype, self.plan, self.has_marks, self.is_plain]
        )

    @staticmethod
    def decode(text: str) -> Wire:
        """From a constant of the graph."""
        owner, group, size, dtype, *rest = json.loads(text)
        return Wire(owner, group, size, getattr(torch, dtype) if dtype else None, *rest)


# From here on a gradient is worth a call of its own; smaller ones are packed as a batch.
LARGE_NUMEL = 16 * 1024


@dataclass(frozen=True, slots=True)
class Slot:
    """A gradient's place in its bucket."""

    index: int  # of the parameter, among its owner's
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # dense: how it lies in the bucket

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions as they lie in memory, the slowest first."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together, one behind the other."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """How many bytes the gradients take."""
        return sum(slot.numel for slot in self.slots) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a bucket: gradients, a mark for each, and the step's mark."""

    num_gradients: int
    num_marks: int
    dtype: torch.dtype
    device: torch.device


def encode_schedule(buckets: Sequence[Bucket], order: Sequence[int]) -> str:
    """What the reduction in a graph is made of, as a constant of the graph.

    `order` is the one in which gradients come there.
    """
    rooms = [
        [
            sum(slot.numel for slot in bucket.slots),
            len(bucket.slots) + 1,
            str(bucket.dtype).removeprefix("torch."),
            str(bucket.device),
        ]
        for bucket in buckets
    ]
    return json.dumps([rooms, list(order)])


@functools.lru_cache(256)  # graphs ask for it at every step
def decode_schedule(text: str) -> tuple[list[Room], list[int]]:
    """The rooms of the buckets, and the order in which gradients come."""
    rooms, order = json.loads(text)
    return [
        Room(numel, num_marks, getattr(torch, dtype), torch.device(device))
        for numel, num_marks, dtype, device in rooms
    ], order
