"""Lay out what overlaps in time: each collective on the first row that is free. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from weft.observe.figures import Interval


def pack_rows(intervals: Sequence[Interval], most: int | None = None) -> list[int]:
    """The row of each interval, so that those of one row don't overlap.

    With `most` rows the last one takes what doesn't fit, and there they may overlap.
    """
    order = sorted(range(len(intervals)), key=lambda at: intervals[at])
    free_from: list[float] = []
    rows = [0] * len(intervals)
    for at in order:
        start, end = intervals[at]
        row = next((row for row, free in enumerate(free_from) if free <= start), len(free_from))
        if row == len(free_from):
            if most is not None and row >= most:
                row = most - 1
            else:
                free_from.append(start)
        free_from[row] = max(free_from[row], end)
        rows[at] = row
    return rows
