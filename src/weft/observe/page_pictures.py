"""The bucket plan and the mesh, as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from weft.observe.quantities import say_bytes, say_count

MOST_BUCKETS = 48
_ROW, _BAR_LEFT, _BAR_WIDTH = 24, 150, 430
_CELL, _PITCH, _PANEL_GAP = 44, 48, 26
_WRAP = 16  # so many ranks of a mesh with one axis stand in a row


def draw_buckets(buckets: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each bucket, or param group, in the order of the plan, as long as it has bytes."""
    shown = list(buckets)[:MOST_BUCKETS]
    if not shown:
        return '<p class="none">No bucket plan was recorded.</p>'
    sizes = [_number(bucket.get("num_bytes")) for bucket in shown]
    largest = max([*sizes, 1])
    parts: list[str] = []
    for at, (bucket, size) in enumerate(zip(shown, sizes, strict=True)):
        y = at * _ROW
        names = [str(name) for name in bucket.get("parameters") or []]
        width = max(size / largest * _BAR_WIDTH, 2)
        label = str(bucket.get("label", at))
        parts.append(
            f'<g class="bucket"><title>{escape(_list_names(label, size, names))}</title>'
            f'<rect class="hit" x="0" y="{y}" width="760" height="{_ROW}"/>'
            f'<text class="name" x="{_BAR_LEFT - 10}" y="{y + 16}" text-anchor="end">'
            f"{escape(_shorten(label, 22))}</text>"
            f'<rect class="bar" x="{_BAR_LEFT}" y="{y + 4}" width="{width:.1f}" height="16" rx="2"/>'
            f'<text class="size" x="{_BAR_LEFT + width + 8:.1f}" y="{y + 16}">{escape(say_bytes(size))}, '
            f"{say_count(len(names), 'parameter')}</text></g>"
        )
    more = len(buckets) - len(shown)
    rest = f"<p>And {say_count(more, 'bucket')} more.</p>" if more else ""
    height = len(shown) * _ROW
    return f'<svg class="buckets" viewBox="0 0 760 {height}" role="img">{"".join(parts)}</svg>{rest}'


def _list_names(label: str, size: float, names: list[str]) -> str:
    lines = [f"{label}: {say_bytes(size)}", *names[:30]]
    if len(names) > 30:
        lines.append(f"and {len(names) - 30} more")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Grid:
    """Where ranks stand: the last two axes are columns and rows, all before them are panels."""

    columns: int
    rows: int
    panels: int
    across: str
    down: str
    outer: str

    @property
    def size(self) -> tuple[int, int]:
        """Of one panel, with the room around it."""
        height = self.rows * _PITCH + _PANEL_GAP + (16 if self.outer else 0)
        return self.columns * _PITCH + _PANEL_GAP, height

    @property
    def panels_in_line(self) -> int:
        """How many panels stand beside each other."""
        return max(1, min(self.panels, 720 // self.size[0]))

    @property
    def corner(self) -> tuple[int, int]:
        """Where the first cell is."""
        return (74 if self.down else 8), 30

    def place(self, rank: int) -> tuple[int, int]:
        """Where a rank's cell is."""
        panel, place = divmod(rank, self.rows * self.columns)
        row, column = divmod(place, self.columns)
        line, beside = divmod(panel, self.panels_in_line)
        (left, top), (width, height) = self.corner, self.size
        return left + beside * width + column * _PITCH, top + line * height + row * _PITCH


def _plan_grid(mesh: Mapping[str, Any], num_ranks: int) -> _Grid:
    shape = [size for size in mesh.get("shape") or [] if isinstance(size, int)]
    names = [str(name) for name in mesh.get("names") or []]
    if not shape or math.prod(shape) != num_ranks or len(names) != len(shape):
        shape, names = [num_ranks], ["ranks"]
    if len(shape) == 1:
        columns = min(num_ranks, _WRAP)
        return _Grid(columns, -(-num_ranks // columns), 1, names[0], "", "")
    return _Grid(shape[-1], shape[-2], math.prod(shape[:-2]), names[-1], names[-2], " × ".join(names[:-2]))


def draw_mesh(
    mesh: Mapping[str, Any], num_ranks: int, warmth: Mapping[int, float], notes: Mapping[int, str]
) -> str:
    """Ranks where they stand in the mesh: the warmer the slower, and without warmth gone."""
    grid = _plan_grid(mesh, num_ranks)
    left, top = grid.corner
    parts: list[str] = [f'<text class="axis" x="{left}" y="16">{escape(grid.across)} →</text>']
    if grid.down:
        parts.append(f'<text class="axis" x="4" y="{top + 26}">{escape(_shorten(grid.down, 9))} ↓</text>')
    for rank in range(num_ranks):
        x, y = grid.place(rank)
        panel, place = divmod(rank, grid.rows * grid.columns)
        if grid.outer and place == 0:
            under = y + grid.rows * _PITCH + 12
            parts.append(f'<text class="axis" x="{x}" y="{under}">{escape(grid.outer)} {panel}</text>')
        parts.append(_cell(rank, x, y, warmth.get(rank), notes.get(rank, "")))
    width = left + grid.panels_in_line * grid.size[0]
    height = top + -(-grid.panels // grid.panels_in_line) * grid.size[1]
    return (
        f'<svg class="mesh" viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img">'
        f"{''.join(parts)}</svg>"
    )


def _cell(rank: int, x: float, y: float, warmth: float | None, note: str) -> str:
    square = f'x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="6"'
    warm = "" if warmth is None else f'<rect class="warm" {square} opacity="{warmth:.2f}"/>'
    return (
        f'<g class="cell {"gone" if warmth is None else "there"}">'
        f"<title>{escape(note or f'rank {rank}: no record')}</title>"
        f'<rect class="box" {square}/>{warm}'
        f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 5}" text-anchor="middle">{rank}</text></g>'
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[-most + 1 :]}"
