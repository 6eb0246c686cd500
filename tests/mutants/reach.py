"""The recorder: which blocks of weft ran during which test, in all processes of a run.

A copy of this file goes into the probed copy of weft, as `weft._reach`, where every block calls `mark`. All
processes map one file: a row of bytes for each test, and in front of them the offset of the current row,
which pytest's process sets. A process notes a block by setting one byte, so nothing is lost when it is
killed, and ranks that live for many tests note under the test that is running.

Needs nothing but the standard library: weft imports it before anything else.
"""

from __future__ import annotations

import mmap
from pathlib import Path

FILE = "reach.bin"
HEADER_BYTES = mmap.PAGESIZE


def _map_rows() -> memoryview | None:
    """The file, beside `src`; None where it can't be had: the code was copied, or another user runs it."""
    try:
        with (Path(__file__).resolve().parents[2] / FILE).open("r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0))
    except OSError:
        return None


_rows = _map_rows()

if _rows is None:

    def mark(probe: int) -> None:
        """Note nothing."""

else:
    _mapped = _rows
    _row = _rows[:8].cast("Q")

    def mark(probe: int) -> None:
        """Note that a block runs."""
        _mapped[_row[0] + probe] = 1


# Dynamo calls such a function while it traces and keeps the result: no graph changes, and the block counts.
mark._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
