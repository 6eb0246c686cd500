"""Where the time of a step went. Pure: intervals in, seconds out.

Invariant: a rank waits only while one of its collectives is under way, so
wait_secs <= comm_secs <= secs, and what is computed is the time without waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.comm import Event

Interval = tuple[float, float]  # from, to


@dataclass(frozen=True)
class StepFigures:
    """One step of one rank."""

    step: int
    secs: float
    compute_secs: float  # all but the waits
    comm_secs: float  # while at least one collective was under way
    wait_secs: float  # while the rank stood still for one
    bytes_in: int  # what the rank gave to collectives
    memory_bytes: int  # the most so far on a GPU, what the process has now on a CPU
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def hidden_share(self) -> float:
        """The part of the communication that the rank computed through; 1 without any."""
        return hidden_share(self.comm_secs, self.wait_secs)


def hidden_share(comm_secs: float, wait_secs: float) -> float:
    """The part of the communication in which nobody waited, from 0 to 1; 1 without any."""
    return 1.0 if comm_secs <= 0 else min(max(1.0 - wait_secs / comm_secs, 0.0), 1.0)


def make_figures(
    step: int,
    within: Interval,
    events: Iterable[Event],
    memory_bytes: int,
    scalars: Mapping[str, float],
) -> StepFigures:
    """The figures of a step that took place within the interval. Notes, which move nothing, don't count."""
    collectives = [event for event in events if not event.is_note]
    start, end = within
    secs = end - start
    comm_secs = covered_secs([(event.start_secs, event.end_secs) for event in collectives], within)
    wait_secs = covered_secs(
        [
            (event.wait_start_secs, event.end_secs)
            for event in collectives
            if event.wait_start_secs is not None
        ],
        within,
    )
    return StepFigures(
        step=step,
        secs=secs,
        compute_secs=secs - wait_secs,
        comm_secs=comm_secs,
        wait_secs=wait_secs,
        bytes_in=sum(event.bytes_in for event in collectives),
        memory_bytes=memory_bytes,
        scalars=dict(scalars),
    )


def covered_secs(intervals: Sequence[Interval], within: Interval) -> float:
    """How much of `within` the intervals cover together."""
    return sum(end - start for start, end in merge(intervals, within))


def merge(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """The intervals cut to `within`, in order, with those that touch made one."""
    first, last = within
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, first), min(end, last)
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
