"""A machine in numbers, and what things take on it. Pure: sizes in, seconds out.

A machine is described by a few rates (a GPU's flops, a link's bandwidth), or measured: then there are curves
of what operations and collectives of several sizes took, and rates serve only what was not measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Seconds by size, at some sizes; between them on straight lines of log to log."""

    points: Points  # (size, secs), by size

    def secs(self, size: float) -> float:
        """What this size takes: beyond the last point in proportion to it, but never less than at the first.

        A single point is for every size.
        """
        points = self.points
        if len(points) == 1:
            return points[0][1]
        at = bisect_left(points, (size, 0.0))
        if at == 0:
            return points[0][1]
        if at == len(points):
            return points[-1][1] * size / points[-1][0]
        (low, low_secs), (high, high_secs) = points[at - 1], points[at]
        part = math.log(size / low) / math.log(high / low)
        return low_secs * (high_secs / low_secs) ** part


@dataclass(frozen=True)
class Work:
    """What an operation has to do."""

    name: str
    flops: float
    num_bytes: int  # that it reads and writes
    is_view: bool = False


@dataclass(frozen=True)
class Link:
    """A way between ranks: bytes a second of one rank, and seconds before the first byte arrives."""

    bytes_per_sec: float
    latency_secs: float


@dataclass(frozen=True)
class Links:
    """How ranks reach each other: within a host, and between hosts."""

    local: Link
    between: Link
    ranks_per_host: int
    # Measured between two ranks of this host, by the op of a Move; sizes are those of the whole.
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    reads_peers: bool = False  # ranks read each other's memory, as the local group does: nothing is packed
    # What a second of communication takes from the computation beside it: 0 where other hardware does it.
    overlap_cost: float = 0.0
    call_secs: float = (
        0.0  # that a collective keeps the rank beside its bytes: its own calls, and ranks that lag
    )


@dataclass(frozen=True)
class Machine:
    """What one rank computes with, and what lies between ranks."""

    name: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_sec: float
    memory_bytes_per_sec: float
    op_secs: float  # that each operation takes beside its work
    view_secs: float
    links: Links
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])  # by name of the operation
    work_factor: float = 1.0  # by how much work takes longer in a step than in the curves
    dtensor_secs: float = 0.0  # that an operation on a DTensor takes before one on what is inside of it

    def work_secs(self, work: Work) -> float:
        """What an operation takes."""
        if work.is_view:
            return self.view_secs
        curve = self.curves.get(work.name)
        if curve is not None:
            return self.op_secs + self.work_factor * curve.secs(max(1.0, work.flops or work.num_bytes))
        by_flops, by_bytes = work.flops / self.flops_per_sec, work.num_bytes / self.memory_bytes_per_sec
        return self.op_secs + self.work_factor * max(by_flops, by_bytes)


@dataclass(frozen=True)
class Spread:
    """How a group lies on hosts."""

    num_ranks: int
    ranks_per_host: int  # of this group

    @property
    def is_local(self) -> bool:
        """Whether all of it is on one host."""
        return self.ranks_per_host >= self.num_ranks


def collective_secs(links: Links, op: str, num_bytes: int, spread: Spread) -> float:
    """What a collective takes: `num_bytes` are those of the whole tensor.

    Between hosts all ranks of a host send side by side, as rings over several network cards do. Latency grows
    with the logarithm of the ranks, as it does with trees.
    """
    ranks = spread.num_ranks
    if ranks == 1:
        return 0.0
    part = (ranks - 1) / ranks
    curve = links.curves.get(op)
    if spread.is_local and curve is not None:
        # Measured with two ranks, which is half of the whole there and another part here.
        return curve.secs(max(1, num_bytes)) * (part / 0.5) + (math.log2(ranks) - 1) * curve.points[0][1]
    link = links.local if spread.is_local else links.between
    bytes_per_sec = link.bytes_per_sec
    if not spread.is_local and spread.ranks_per_host > 1:
        bytes_per_sec = min(links.local.bytes_per_sec, spread.ranks_per_host * link.bytes_per_sec)
    num_turns = 2 if op == "all_reduce" else 1
    latency_secs = num_turns * math.ceil(math.log2(ranks)) * link.latency_secs
    return latency_secs + num_turns * part * num_bytes / bytes_per_sec
