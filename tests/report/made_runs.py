"""Recorded runs made by hand: every time in them is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def event_line(step: int, start: float, end: float, **changes: Any) -> Line:
    line: Line = {
        "kind": "event",
        "op": "all_reduce",
        "feature": "ddp",
        "label": "bucket 0",
        "group": "0",
        "group_size": 2,
        "bytes_in": 1024,
        "bytes_out": 1024,
        "dtype": "float32",
        "wait_start": None,
        "wait_end": None,
        "error": None,
        "start": start,
        "end": end,
        "step": step,
    }
    return line | changes


def rank_lines(rank: int, steps: range, *, slow: float = 0.0, host: str = "host") -> list[Line]:
    """A rank whose steps begin at 100, 101, ... and take 0.8 seconds.

    0.3 forward, 0.3 backward, in which bucket 0 goes from 0.3 to 0.5 and bucket 1 from 0.4 to 0.7, of
    which it waits from 0.6; but a slow rank waits that much less. 0.1 optimizer.
    """
    lines: list[Line] = [
        {
            "kind": "rank",
            "rank": rank,
            "host": host,
            "pid": 1000 + rank,
            "device": "cpu",
            "perf_secs": 90.0,
            "wall_secs": 1_700_000_000.0,
        }
    ]
    for step in steps:
        t = 100.0 + step
        wait_start = t + 0.6 + slow
        lines += [
            event_line(step, t + 0.3, t + 0.5),
            event_line(step, t + 0.4, t + 0.7, label="bucket 1", wait_start=wait_start, wait_end=t + 0.7),
            {
                "kind": "note",
                "op": "reshard",
                "feature": "fsdp",
                "label": "x",
                "start": t,
                "end": t,
                "step": step,
            },
            {"kind": "span", "name": "forward", "step": step, "start": t, "end": t + 0.3},
            {"kind": "span", "name": "backward", "step": step, "start": t + 0.3, "end": t + 0.6},
            {"kind": "span", "name": "optimizer", "step": step, "start": t + 0.7, "end": t + 0.8},
            {
                "kind": "step",
                "step": step,
                "start": t,
                "end": t + 0.8,
                "compute_secs": 0.7 + slow,
                "comm_secs": 0.4,
                "wait_secs": 0.1 - slow,
                "bytes_in": 2048,
                "memory_bytes": (100 + rank) * 2**20,
                "loss": 4.0 / (step + 1),
                "tokens": 256,
            },
        ]
    return lines


def write_rank(directory: Path, rank: int, lines: list[Line], end: str = "") -> Path:
    path = directory / f"rank-{rank:05d}.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines) + end)
    return path


def write_run(
    directory: Path, ranks: int = 2, steps: int = 30, *, slow: dict[int, float] | None = None, **about: Any
) -> Path:
    """A whole run; `slow` says by how much some ranks are."""
    directory.mkdir(parents=True, exist_ok=True)
    told: Line = {
        "format": 1,
        "weft": "0.1.0",
        "torch": "2.13.0",
        "started": "2026-01-02T03:04:05+00:00",
        "command": ["weft", "train"],
        "strategy": "ddp",
        "ranks": ranks,
        "mesh": {"names": ["dp"], "shape": [ranks]},
        "model": {"name": "tiny", "num_parameters": 1234567},
        "options": {"lr": 0.1},
        "buckets": [
            {"label": "bucket 0", "num_bytes": 1024, "parameters": ["head.weight", "head.bias"]},
            {"label": "bucket 1", "num_bytes": 2048, "parameters": ["embed.weight"]},
        ],
    }
    (directory / "run.json").write_text(json.dumps(told | about))
    for rank in range(ranks):
        write_rank(directory, rank, rank_lines(rank, range(steps), slow=(slow or {}).get(rank, 0.0)))
    return directory
