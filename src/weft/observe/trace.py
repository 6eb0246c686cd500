"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, in Chrome's JSON format.

Each rank is a process with threads: its steps, what it computed, its waits, and its collectives, in
several threads where they overlap. Memory and the loss are counters. One event a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from weft.observe.lanes import pack_rows
from weft.observe.reading import EventRow, RankLog, Run

_STEPS, _COMPUTE, _WAITS, _COMM = 0, 1, 2, 3  # threads; further rows of collectives come after

Event = dict[str, Any]


def make_trace(run: Run) -> Iterator[bytes]:
    """The trace of the chosen steps, in pieces of a file."""
    times = [step.start for log in run.logs for step in log.steps]
    times += [event.start for log in run.logs for event in log.events]
    zero = min(times, default=0.0)
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    is_first = True
    for log in run.logs:
        for event in _rank_events(log, run, zero):
            yield b"" if is_first else b",\n"
            yield json.dumps(event, separators=(",", ":"), allow_nan=False).encode()
            is_first = False
    about = {name: str(run.about.get(name, "")) for name in ("strategy", "weft", "torch", "started")}
    yield b'\n],"otherData":' + json.dumps(about).encode() + b"}\n"


def _rank_events(log: RankLog, run: Run, zero: float) -> Iterator[Event]:
    rank = log.rank
    rows = pack_rows([(event.start, event.end) for event in log.events])
    yield _meta(rank, "process_name", {"name": f"rank {rank}"})
    yield _meta(rank, "process_labels", {"labels": f"{log.host}, {log.device}"})
    yield _meta(rank, "process_sort_index", {"sort_index": rank})
    names = ["steps", "compute", "waits", "communication"]
    names += [f"communication {row + 1}" for row in range(1, max(rows, default=0) + 1)]
    for thread, name in enumerate(names):
        yield _meta(rank, "thread_name", {"name": name}, thread)
        yield _meta(rank, "thread_sort_index", {"sort_index": thread}, thread)
    for step in log.steps:
        if run.first_step <= step.step <= run.last_step:
            scalars = {name: value for name, value in step.scalars.items() if math.isfinite(value)}
            yield _slice(rank, _STEPS, f"step {step.step}", (step.start, step.end), zero, "step", scalars)
            yield _counter(rank, "memory", step.end - zero, step.memory_bytes)
            if "loss" in scalars:
                yield _counter(rank, "loss", step.end - zero, scalars["loss"])
    for span in log.spans:
        yield _slice(rank, _COMPUTE, span.name, (span.start, span.end), zero, "compute", {"step": span.step})
    for event, row in zip(log.events, rows, strict=True):
        times = (event.start, event.end)
        yield _slice(rank, _COMM + row, event.name, times, zero, event.feature, _args(event))
        if event.wait_start is not None:
            waited = (event.wait_start, event.end)
            yield _slice(rank, _WAITS, f"wait for {event.name}", waited, zero, "wait", {"step": event.step})


def _args(event: EventRow) -> dict[str, Any]:
    args: dict[str, Any] = {
        "op": event.op,
        "label": event.label,
        "feature": event.feature,
        "bytes_in": event.bytes_in,
        "bytes_out": event.bytes_out,
        "dtype": event.dtype,
        "group_size": event.group_size,
        "step": event.step,
        "wait_ms": round(event.wait_secs * 1e3, 4),
    }
    return args if event.error is None else args | {"error": event.error}


def _slice(
    rank: int,
    thread: int,
    name: str,
    times: tuple[float, float],
    zero: float,
    category: str,
    args: dict[str, Any],
) -> Event:
    start, end = times
    where = {"pid": rank, "tid": thread, "ts": _micros(start - zero), "dur": _micros(end - start)}
    return {"ph": "X", "name": name, "cat": category, **where, "args": args}


def _counter(rank: int, name: str, at: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": _micros(at), "args": {name: value}}


def _meta(rank: int, name: str, args: dict[str, Any], thread: int = 0) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _micros(secs: float) -> float:
    return round(secs * 1e6, 1)
