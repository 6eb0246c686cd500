"""Tables of plain text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Align the columns: the first to the left, the others, being numbers, to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(indent + "  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def format_bytes(num_bytes: int) -> str:
    """A size as a person says it: 4 KB, 1.5 MB."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GB"
