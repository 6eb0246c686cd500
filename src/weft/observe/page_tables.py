"""The page's tables: traffic by feature and operation, what was waited for, the ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.observe.figures import hidden_share
from weft.observe.quantities import say_bytes, say_secs, say_share
from weft.observe.reading import Kind, Run, Traffic
from weft.observe.summary import Summary, by_op

MOST_LABELS = 15
MOST_ROWS = 200  # of operations, those with the most bytes


@dataclass(frozen=True)
class Bar:
    """A cell with a bar in it: the text, and how much of the cell the bar fills, from 0 to 1."""

    text: str
    share: float


Cell = str | Bar


def draw_table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], num_words: int) -> str:
    """A table whose first `num_words` columns are words, and the others numbers."""
    head = "".join(
        f"<th{'' if at < num_words else ' class=num'}>{escape(text)}</th>" for at, text in enumerate(heads)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, at >= num_words) for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell, is_number: bool) -> str:
    kind = " class=num" if is_number else ""
    if isinstance(cell, str):
        return f"<td{kind}>{escape(cell)}</td>"
    percent = min(max(cell.share, 0.0), 1.0) * 100
    meter = f'<span class="meter"><i style="width:{percent:.1f}%"></i></span>'
    return f'<td{kind}>{meter}<span class="met">{escape(cell.text)}</span></td>'


def traffic_table(run: Run, total: dict[Kind, Traffic], num_rank_steps: int) -> str:
    """What a rank communicates in an average step, by feature and operation."""
    found = dict(list(by_op(total).items())[:MOST_ROWS])
    busy = {kind: _busy_secs(run, kind) for kind in found}
    if not found or not num_rank_steps:
        return '<p class="none">Nothing was communicated.</p>'
    most = max(max(traffic.bytes_in for traffic in found.values()), 1)
    rows: list[list[Cell]] = [
        [
            feature,
            op,
            f"{traffic.num_calls / num_rank_steps:.4g}",
            Bar(say_bytes(traffic.bytes_in / num_rank_steps), traffic.bytes_in / most),
            say_bytes(traffic.bytes_out / num_rank_steps),
            say_secs(busy[feature, op][0] / num_rank_steps),
            say_secs(busy[feature, op][1] / num_rank_steps),
            say_share(hidden_share(*busy[feature, op])),
            say_bytes(traffic.bytes_in),
        ]
        for (feature, op), traffic in found.items()
    ]
    heads = ["feature", "operation", "calls", "gives", "gets", "under way", "waits", "hidden", "given in all"]
    return draw_table(heads, rows, 2)


def _busy_secs(run: Run, kind: tuple[str, str]) -> tuple[float, float]:
    """How long such collectives were under way on all ranks together, and how long ranks waited for them."""
    found = [log.busy[kind] for log in run.logs if kind in log.busy]
    return sum(busy.secs for busy in found), sum(busy.wait_secs for busy in found)


def waits_table(total: dict[Kind, Traffic], num_rank_steps: int) -> str:
    """What a rank waits for most in an average step, by label."""
    waited = sorted(total.items(), key=lambda item: -item[1].wait_secs)
    waited = [(kind, traffic) for kind, traffic in waited if traffic.wait_secs > 0][:MOST_LABELS]
    if not waited or not num_rank_steps:
        return '<p class="none">No rank stood still for a collective.</p>'
    most = waited[0][1].wait_secs
    rows: list[list[Cell]] = [
        [
            label or "(none)",
            op,
            feature,
            Bar(say_secs(traffic.wait_secs / num_rank_steps), traffic.wait_secs / most),
            f"{traffic.num_calls / num_rank_steps:.4g}",
            say_bytes(traffic.bytes_in / max(traffic.num_calls, 1)),
        ]
        for (feature, op, label), traffic in waited
    ]
    return draw_table(["about", "operation", "feature", "waits", "calls", "bytes a call"], rows, 3)


def ranks_table(run: Run, summary: Summary) -> str:
    """Each rank's median step."""
    logs = {log.rank: log for log in run.logs}
    longest = max((rank.compute_secs for rank in summary.ranks), default=0.0) or 1.0
    rows: list[list[Cell]] = [
        [
            f"rank {rank.rank}",
            logs[rank.rank].host,
            logs[rank.rank].device,
            f"{rank.num_steps:,}",
            say_secs(rank.secs),
            Bar(say_secs(rank.compute_secs), rank.compute_secs / longest),
            say_secs(rank.comm_secs),
            say_secs(rank.wait_secs),
            say_bytes(rank.memory_bytes),
        ]
        for rank in summary.ranks
    ]
    heads = ["rank", "host", "device", "steps", "step", "computes", "communicates", "waits", "memory"]
    return draw_table(heads, rows, 3)
