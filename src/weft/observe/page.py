"""The report of a run: one HTML file that needs nothing else, no network and no library.

The texts and tables are made here, the drawing by page/timeline.js from the numbers of
page_data.py. Whatever comes from a run is escaped, and the page's own policy keeps a browser from
loading anything.
"""

from __future__ import annotations

import statistics
from html import escape
from importlib import resources
from typing import Any

from weft.observe.page_charts import Chart, chart_numbers, draw_chart, mean, thin_out
from weft.observe.page_data import embed_json, timeline_data
from weft.observe.page_pictures import draw_buckets, draw_mesh
from weft.observe.page_tables import ranks_table, traffic_table, waits_table
from weft.observe.quantities import say_bytes, say_count, say_secs, say_share
from weft.observe.reading import Run
from weft.observe.summary import Summary, add_up, summarize, write_sentences

MOST_ERRORS = 8


def make_page(run: Run) -> str:
    """The page, as the text of an HTML file."""
    summary = summarize(run)
    charts = make_charts(run, summary)
    total = add_up(run.logs)
    num_rank_steps = sum(rank.num_steps for rank in summary.ranks)
    numbers = {"timeline": timeline_data(run), "charts": [chart_numbers(chart) for chart in charts]}
    values = {
        "STYLE": _asset("style.css"),
        "TITLE": escape(_title(run)),
        "FACTS": escape(_facts(run)),
        "TILES": _tiles(run, summary),
        "SENTENCES": "".join(f"<p>{escape(text)}</p>" for text in write_sentences(run, summary)),
        "NOTICES": _notices(run),
        "WINDOW": escape(_window(run, summary)),
        "CHARTS": "".join(draw_chart(chart) for chart in charts),
        "TRAFFIC": traffic_table(run, total, num_rank_steps),
        "WAITS": waits_table(total, num_rank_steps),
        "BUCKETS": draw_buckets([_dict(bucket) for bucket in _list(run.about.get("buckets"))]),
        "MESH": draw_mesh(_dict(run.about.get("mesh")), run.num_ranks, *_warmth(summary)),
        "RANKS": ranks_table(run, summary),
        "OPTIONS": escape(_options(run)),
        "NUMBERS": embed_json(numbers),
        "SCRIPT": "\n".join(_asset(name) for name in ("timeline.js", "tips.js", "page.js")),
    }
    return fill(_asset("page.html"), values)


def fill(template: str, values: dict[str, str]) -> str:
    """The template with each {{NAME}} replaced, once: what is put in is not looked at again."""
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [values[name], rest]
    return "".join(filled)


def _asset(name: str) -> str:
    return resources.files("weft.observe").joinpath("page", name).read_text(encoding="utf-8")


def make_charts(run: Run, summary: Summary) -> list[Chart]:
    """The loss, each rank's step time, each rank's memory."""
    times = {f"rank {log.rank}": [(step.step, step.secs) for step in log.steps] for log in run.logs}
    memory = {f"rank {log.rank}": [(step.step, step.memory_bytes) for step in log.steps] for log in run.logs}
    losses = thin_out(summary.losses, mean)
    return [
        Chart("Loss", lambda value: f"{value:.4g}", {"": losses}, from_zero=False),
        Chart("Step time", say_secs, {name: thin_out(points, max) for name, points in times.items()}),
        Chart(
            "Memory", say_bytes, {name: thin_out(points, max) for name, points in memory.items()}, base=1024
        ),
    ]


def _title(run: Run) -> str:
    strategy = str(run.about.get("strategy") or "run")
    return f"{strategy} on {say_count(run.num_ranks, 'rank')}"


def _facts(run: Run) -> str:
    model = _dict(run.about.get("model"))
    facts: list[str] = []
    if model.get("name"):
        size = model.get("num_parameters")
        facts.append(
            f"{model['name']} ({size:,} parameters)" if isinstance(size, int) else str(model["name"])
        )
    if resumed := run.about["resumed"]:
        at = ", ".join(str(step) for step in resumed[-5:])
        facts.append(f"resumed at step{'s' if len(resumed) > 1 else ''} {at}")
    facts += [
        str(run.about.get("started") or ""),
        f"weft {run.about.get('weft')}, torch {run.about.get('torch')}",
    ]
    return " · ".join(fact for fact in facts if fact)


def _tiles(run: Run, summary: Summary) -> str:
    tiles = [("median step", say_secs(summary.median_secs)), ("steps", f"{summary.num_steps:,}")]
    tiles.append(("communication hidden", say_share(summary.hidden_share) if summary.comm_secs else "none"))
    if summary.losses:
        tiles.append(("last loss", f"{summary.losses[-1][1]:.4g}"))
    if summary.slowest is not None:
        behind = "" if summary.is_even else f", by {say_secs(summary.behind_secs)}"
        tiles.append((f"slowest{behind}", "none" if summary.is_even else f"rank {summary.slowest.rank}"))
    if summary.ranks:
        tiles.append(("most memory", say_bytes(max(rank.memory_bytes for rank in summary.ranks))))
    return "".join(f"<div><b>{escape(text)}</b><span>{escape(name)}</span></div>" for name, text in tiles)


def _notices(run: Run) -> str:
    errors = [f"Rank {log.rank}: {error}" for log in run.logs for error in log.errors]
    notices = [*run.problems, *errors[:MOST_ERRORS]]
    if len(errors) > MOST_ERRORS:
        notices.append(f"{len(errors) - MOST_ERRORS} more collectives failed.")
    return "".join(f'<p class="notice">{escape(notice)}</p>' for notice in notices)


def _window(run: Run, summary: Summary) -> str:
    shown = {
        step.step for log in run.logs for step in log.steps if run.first_step <= step.step <= run.last_step
    }
    if len(shown) >= summary.num_steps:
        return f"All {say_count(summary.num_steps, 'step')} of the run are here."
    return (
        f"Steps {run.first_step} to {run.last_step} of {summary.num_steps:,} are here. For others make the "
        "report with --steps A:B. Charts and tables are of all steps."
    )


def _warmth(summary: Summary) -> tuple[dict[int, float], dict[int, str]]:
    """How much slower than the fastest each rank is, from 0 to 1, and what to say of it."""
    if not summary.ranks:
        return {}, {}
    times = [rank.compute_secs for rank in summary.ranks]
    least, middle = min(times), statistics.median(times)
    # A difference of a fifth is as warm as it gets, so that noise stays cool.
    width = max(max(times) - least, 0.2 * middle) or 1.0
    warmth = {rank.rank: (rank.compute_secs - least) / width for rank in summary.ranks}
    notes = {
        rank.rank: f"rank {rank.rank}: computes {say_secs(rank.compute_secs)} a step, waits "
        f"{say_secs(rank.wait_secs)}, {say_bytes(rank.memory_bytes)}"
        for rank in summary.ranks
    }
    return warmth, notes


def _options(run: Run) -> str:
    command = " ".join(str(part) for part in _list(run.about.get("command")))
    options = ", ".join(f"{name} {value}" for name, value in _dict(run.about.get("options")).items())
    return "\n".join(part for part in (command, options, str(run.directory)) if part)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}  # type: ignore[reportUnknownVariableType]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # type: ignore[reportUnknownVariableType]
