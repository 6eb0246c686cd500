"""What the page's timeline draws, as few numbers. Pure.

Texts are listed once and referred to by number; times are whole microseconds from the first
moment shown. A rank's spans and events are flat lists of SPAN_WIDTH and EVENT_WIDTH numbers each,
which page/timeline.js takes apart.
"""

from __future__ import annotations

import json
from typing import Any

from weft.observe.lanes import pack_rows
from weft.observe.reading import RankLog, Run

SPAN_WIDTH = 4  # name, start, length, step
EVENT_WIDTH = 12  # see _event_numbers


class _Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.all))
        if number == len(self.all):
            self.all.append(text)
        return number


def most_rows(num_ranks: int) -> int:
    """How many rows a rank's overlapping collectives may take: few where many ranks share the height."""
    return next(rows for ranks, rows in ((2, 12), (4, 8), (16, 4), (num_ranks, 2)) if num_ranks <= ranks)


def timeline_data(run: Run) -> dict[str, Any]:
    """The chosen steps of all ranks."""
    shown = [
        (log.rank, step)
        for log in run.logs
        for step in log.steps
        if run.first_step <= step.step <= run.last_step
    ]
    starts = [step.start for _, step in shown] + [span.start for log in run.logs for span in log.spans]
    starts += [event.start for log in run.logs for event in log.events]
    ends = [step.end for _, step in shown] + [event.end for log in run.logs for event in log.events]
    ends += [span.end for log in run.logs for span in log.spans]
    zero = min(starts, default=0.0)
    bounds: dict[int, tuple[float, float]] = {}
    for _, step in shown:
        start, end = bounds.get(step.step, (step.start, step.end))
        bounds[step.step] = min(start, step.start), max(end, step.end)
    texts = _Texts()
    return {
        "length": max(_micros(max(ends, default=0.0) - zero), 1),
        "steps": [[step, _micros(a - zero), _micros(b - zero)] for step, (a, b) in sorted(bounds.items())],
        "ranks": [_rank_data(log, zero, texts, most_rows(len(run.logs))) for log in run.logs],
        "texts": texts.all,
    }


def _rank_data(log: RankLog, zero: float, texts: _Texts, most: int) -> dict[str, Any]:
    spans: list[int] = []
    for span in log.spans:
        start, step = _micros(span.start - zero), -1 if span.step is None else span.step
        spans += [texts.number(span.name), start, _micros(span.end - zero) - start, step]
    rows = pack_rows([(event.start, event.end) for event in log.events], most)
    events: list[int] = []
    for event, row in zip(log.events, rows, strict=True):
        start = _micros(event.start - zero)
        events += [
            texts.number(event.op),
            texts.number(event.feature),
            texts.number(event.label),
            start,
            _micros(event.end - zero) - start,
            -1 if event.wait_start is None else _micros(event.wait_start - zero) - start,
            row,
            -1 if event.step is None else event.step,
            event.bytes_in,
            event.bytes_out,
            event.group_size,
            texts.number(event.dtype if event.error is None else f"{event.dtype}, failed: {event.error}"),
        ]
    return {"rank": log.rank, "rows": max(rows, default=0) + 1, "spans": spans, "events": events}


def _micros(secs: float) -> int:
    return round(secs * 1e6)


def embed_json(values: Any) -> str:
    """JSON that can stand inside a script element: no text in it can end the element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
