"""Lay out what overlaps in time: each collective on the first row that is free. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from weft.observe.figures import Interval


def pack_rows(intervals: Sequence[Interval], most: int | None = None) -> list[int]:
    """The row of each interval, so that those of one row don't overlap.

    With `most` rows the last one takes what doesn't fit, and there they may overlap.
    """
    order = sorted(range(len(intervals)), key=lambda at: intervals[at])
    free: list[int] = []  # rows, the first one on top
    taken: list[tuple[float, int]] = []  # (end, row), a heap
    taken_until: list[float] = []  # by row
    rows = [0] * len(intervals)
    for at in order:
        start, end = intervals[at]
        while taken and taken[0][0] <= start:
            until, row = heappop(taken)
            if until == taken_until[row]:  # else the last row was taken again in between
                heappush(free, row)
        if free:
            row = heappop(free)
        elif most is None or len(taken_until) < most:
            row = len(taken_until)
            taken_until.append(end)
        elif end > taken_until[row := most - 1]:
            pass  # the last row stays taken, for longer
        else:
            rows[at] = row
            continue
        taken_until[row] = end
        heappush(taken, (end, row))
        rows[at] = row
    return rows
