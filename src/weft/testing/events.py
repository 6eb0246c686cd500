"""Assert on what `weft.record()` recorded: which calls, in which order, of how many bytes, beside what.

    with weft.record() as events:
        step()
    assert_calls(events, ["broadcast", Expect("all_reduce", feature="ddp", bytes_in=4096)])

Pure: events in, verdict out. Recording them is weft.comm's work.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from weft.comm import Event
from weft.errors import ConfigError


@dataclass(frozen=True)
class Expect:
    """A call to look for. What is None may be anything."""

    op: str | None = None
    feature: str | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    dtype: torch.dtype | None = None
    group_size: int | None = None
    detail: str | None = None  # the reduce op, the root

    def fits(self, event: Event) -> bool:
        """Whether the event is such a call."""
        return all(value == getattr(event, name) for name, value in self._given())

    def words(self) -> str:
        """What is asked for, as a line of a report."""
        rest = [f"{name}={value}" for name, value in self._given() if name != "op"]
        return " ".join([self.op or "any op", *rest])

    def _given(self) -> list[tuple[str, object]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in values if value is not None]


def assert_calls(events: Iterable[Event], expected: Sequence[str | Expect], *, exact: bool = True) -> None:
    """Check one rank's calls, in the order in which they were started.

    A string stands for an op. With exact=False other calls may come before, between and after the
    expected ones. Raises AssertionError with both lists aligned.
    """
    called = sorted(events, key=lambda event: event.start_secs)
    ranks = sorted({event.rank for event in called})
    if len(ranks) > 1:
        raise ConfigError(f"assert_calls: these are events of ranks {ranks}, in no order; give one rank's.")
    wanted = [Expect(item) if isinstance(item, str) else item for item in expected]
    rows = _align(wanted, called)
    is_missing = any(event is None for _, event in rows)
    is_extra = any(want is None for want, _ in rows)
    if is_missing or (exact and is_extra):
        marks = {(False, False): " ", (False, True): "-", (True, False): "+"}
        lines = [f"  {marks[want is None, event is None]} {_words(want, event)}" for want, event in rows]
        who = f"rank {ranks[0]}" if ranks else "no rank"
        raise AssertionError(
            f"{who} made other calls than expected (- not called, + {'' if exact else 'also '}called):\n"
            + "\n".join(lines)
        )


def bytes_by_op(events: Iterable[Event]) -> dict[str, int]:
    """How many bytes the ranks gave to each op, in all."""
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.op] += event.bytes_in
    return dict(totals)


class Timed(Protocol):
    """What has a beginning and an end on the clock of time.perf_counter: an Event, a Span."""

    @property
    def start_secs(self) -> float: ...

    @property
    def end_secs(self) -> float: ...


@dataclass
class Span:
    """When something ran; its end is infinite while it does."""

    start_secs: float
    end_secs: float = math.inf


@contextmanager
def span() -> Generator[Span]:
    """Take the time of a block, to compare with events: `with span() as backward: loss.backward()`."""
    running = Span(time.perf_counter())
    try:
        yield running
    finally:
        running.end_secs = time.perf_counter()


def overlaps(a: Timed, b: Timed) -> bool:
    """Whether both ran at one time. The end of one that is the beginning of the other does not count."""
    return a.start_secs < b.end_secs and b.start_secs < a.end_secs


Row = tuple[Expect | None, Event | None]


def _align(wanted: Sequence[Expect], called: Sequence[Event]) -> list[Row]:
    """Pair as many calls with what fits them as order allows; the rest stand alone."""
    # best[i][j]: how many pairs wanted[i:] and called[j:] can form.
    best = [[0] * (len(called) + 1) for _ in range(len(wanted) + 1)]
    for i in reversed(range(len(wanted))):
        for j in reversed(range(len(called))):
            pair = best[i + 1][j + 1] + 1 if wanted[i].fits(called[j]) else 0
            best[i][j] = max(pair, best[i + 1][j], best[i][j + 1])
    rows: list[Row] = []
    i = j = 0
    while i < len(wanted) and j < len(called):
        if wanted[i].fits(called[j]) and best[i][j] == best[i + 1][j + 1] + 1:
            rows.append((wanted[i], called[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            rows.append((wanted[i], None))
            i += 1
        else:
            rows.append((None, called[j]))
            j += 1
    rows += [(want, None) for want in wanted[i:]]
    rows += [(None, event) for event in called[j:]]
    return rows


def _words(want: Expect | None, event: Event | None) -> str:
    if event is None:
        return want.words() if want is not None else ""
    shapes = ", ".join(str(list(shape)) for shape in event.shapes)
    dtype = str(event.dtype).removeprefix("torch.")
    detail = f" ({event.detail})" if event.detail else ""
    return (
        f"{event.op}{detail} feature={event.feature} {dtype} {shapes} bytes_in={event.bytes_in} "
        f"bytes_out={event.bytes_out} group_size={event.group_size} at {event.site}"
    )
