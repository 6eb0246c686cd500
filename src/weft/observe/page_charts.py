"""Charts over steps, as SVG. Pure.

A run may have thousands of steps: neighbours are drawn as one point. Up to MOST_LINES ranks get a
line each; of more, the median is drawn, in a band from the least to the most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MOST_LINES = 8
MOST_POINTS = 300
WIDTH, HEIGHT = 460, 220
_NEARLY_NOTHING, _NEARLY_ENDLESS = 1e-100, 1e100
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 30

Point = tuple[int, float]  # step, value


@dataclass(frozen=True)
class Chart:
    """A title, what its numbers are, and a line of points by name."""

    title: str
    say: Callable[[float], str]
    lines: dict[str, list[Point]]
    from_zero: bool = True
    base: int = 10  # of the numbers that are round: 1024 for bytes


def thin_out(
    points: Sequence[Point], join: Callable[[Iterable[float]], float], most: int = MOST_POINTS
) -> list[Point]:
    """At most so many points: neighbours become one, at the first of their steps, and in the end the last."""
    size = -(-len(points) // most) if points else 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    joined = [(group[0][0], join([value for _, value in group])) for group in groups]
    if len(joined) > 1:
        joined[-1] = points[-1][0], joined[-1][1]
    return joined


def mean(values: Iterable[float]) -> float:
    """The mean of some numbers; infinite where their sum overflows."""
    found = list(values)
    return sum(found) / len(found)


def band_of(lines: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Least, median and most of many lines, by step."""
    by_step: dict[int, list[float]] = {}
    for points in lines.values():
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    return {
        "least": [(step, min(by_step[step])) for step in steps],
        "median": [(step, statistics.median(by_step[step])) for step in steps],
        "most": [(step, max(by_step[step])) for step in steps],
    }


def draw_chart(chart: Chart) -> str:
    """The chart as an SVG element, with its numbers in an attribute for the script that shows them."""
    lines = _drawable(chart)
    if not lines:
        return (
            f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption><p>No numbers.</p></figure>'
        )
    is_band = len(lines) > MOST_LINES
    if is_band:
        lines = band_of(lines)
    place = _Place(lines, chart)
    parts = [*_axes(place, chart.say)]
    if is_band:
        edge = [*lines["most"], *reversed(lines["least"])]
        parts.append(f'<polygon class="band" points="{place.path(edge)}"/>')
        parts.append(f'<polyline class="line s0" points="{place.path(lines["median"])}"/>')
    else:
        for number, points in enumerate(lines.values()):
            if len(points) == 1:
                x, y = place.at(points[0])
                parts.append(f'<circle class="dot s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            parts.append(f'<polyline class="line s{number}" points="{place.path(points)}"/>')
    legend = "".join(
        f'<span class="key"><i class="s{number}"></i>{escape(name)}</span>'
        for number, name in enumerate(lines)
    )
    if is_band:
        legend = (
            '<span class="key"><i class="s0"></i>median rank</span><span class="key">band: all ranks</span>'
        )
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}'
        f'<span class="keys">{legend if len(lines) > 1 else ""}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} over steps">'
        f"{''.join(parts)}</svg></figure>"
    )


def chart_numbers(chart: Chart) -> dict[str, Any]:
    """What the script shows where the pointer is: places and texts."""
    lines = _drawable(chart)
    if not lines:
        return {"x": [], "texts": []}
    place_lines = band_of(lines) if len(lines) > MOST_LINES else lines
    place = _Place(place_lines, chart)
    by_step: dict[int, list[str]] = {}
    for name, points in place_lines.items():
        for step, value in points:
            by_step.setdefault(step, []).append(f"{name}: {chart.say(value)}" if name else chart.say(value))
    steps = sorted(by_step)
    return {
        "x": [round(place.x(step), 1) for step in steps],
        "texts": [[f"step {step}", *by_step[step]] for step in steps],
    }


def _drawable(chart: Chart) -> dict[str, list[Point]]:
    """The lines without points beyond what an axis can show; tiny values become 0."""
    lines = {
        name: [
            (step, value if abs(value) > _NEARLY_NOTHING else 0.0)
            for step, value in points
            if abs(value) < _NEARLY_ENDLESS
        ]
        for name, points in chart.lines.items()
    }
    return {name: points for name, points in lines.items() if points}


class _Place:
    """Where a point lies in the drawing."""

    def __init__(self, lines: dict[str, list[Point]], chart: Chart) -> None:
        steps = [step for points in lines.values() for step, _ in points]
        values = [value for points in lines.values() for _, value in points]
        self.first, self.last = min(steps), max(steps)
        low, high = min(values), max(values)
        low = min(low, 0.0) if chart.from_zero else low
        high = high if high - low > 1e-12 * abs(low) else low + (abs(low) or 1.0)
        unit = (
            float(chart.base ** int(math.log(max(abs(low), abs(high)), chart.base)))
            if chart.base != 10
            else 1.0
        )
        self.ticks = [tick * unit for tick in round_ticks(low / unit, high / unit)]
        self._low = min(low, self.ticks[0])
        self._high = max(high, self.ticks[-1])

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def at(self, point: Point) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])

    def path(self, points: Iterable[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))


def round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that cover the range, some four of them."""
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    width = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
    first = math.floor(low / width + 1e-9)
    last = math.ceil(high / width - 1e-9)
    return [number * width for number in range(first, last + 1)]


def _axes(place: _Place, say: Callable[[float], str]) -> list[str]:
    parts: list[str] = []
    for tick in place.ticks:
        y = place.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(say(tick))}</text>'
        )
    middle = (place.first + place.last) // 2
    anchors = {place.first: "start", middle: "middle", place.last: "end"}
    for step, anchor in anchors.items():
        if place.first == place.last:
            anchor = "middle"
        parts.append(
            f'<text class="tick" x="{place.x(step):.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">'
            f"{'step ' if step == place.first else ''}{step}</text>"
        )
    return parts
