"""Sizes, times and shares as a person says them. Pure."""

from __future__ import annotations

import math


def say_bytes(num_bytes: float) -> str:
    """A size: 4 KB, 1.5 MB."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1023.5:
            return f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TB"


def say_secs(secs: float) -> str:
    """A time: 35 µs, 12.3 ms, 4.56 s, 3 min 20 s."""
    if not math.isfinite(secs):
        return "?"
    if secs == 0:
        return "0 s"
    if abs(secs) < 0.9995e-3:
        return f"{_three_digits(secs * 1e6)} µs"
    if abs(secs) < 0.9995:
        return f"{_three_digits(secs * 1e3)} ms"
    if abs(secs) < 99.95:
        return f"{_three_digits(secs)} s"
    minutes, rest = divmod(round(secs), 60)
    return f"{minutes} min {rest} s"


def say_share(share: float) -> str:
    """A part of a whole: 7%, 0.4%."""
    percent = share * 100
    return f"{percent:.1g}%" if 0.05 <= abs(percent) < 0.95 else f"{percent:.0f}%"


def say_count(number: int, noun: str) -> str:
    """A number of things: 1 rank, 2 ranks, 12,000 steps."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def say_ranks(ranks: list[int]) -> str:
    """Ranks in order, runs of them shortened: 0-3, 7."""
    parts: list[str] = []
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        parts.append(str(ranks[at]) if end == at else f"{ranks[at]}-{ranks[end]}")
        at = end + 1
    return ", ".join(parts)


def _three_digits(number: float) -> str:
    if number == 0:
        return "0"
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    text = f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
    return text.rstrip("0").rstrip(".") or "0"
