"""A run as text for a terminal: a row for each rank, a sign for each moment of the last steps."""

from __future__ import annotations

from pathlib import Path

from weft.observe.figures import Interval, covered_secs
from weft.observe.quantities import say_count, say_secs, say_share
from weft.observe.reading import RankLog, Run, StepRow, read_run
from weft.observe.summary import Summary, say_slowest, say_steps, say_traffic, summarize

SHOWN_STEPS = 3
MOST_RANKS = 32
LEAST_WIDTH = 40
COMPUTES, HIDES, WAITS, NOTHING = "█", "▓", "░", " "
LEGEND = f"{COMPUTES} computes   {HIDES} computes while a collective is under way   {WAITS} waits for one"


def draw_run(directory: Path | str, width: int = 100) -> str:
    """The last steps of a recorded run, a legend and what it shows. Raises ConfigError as read_run does."""
    run = read_run(Path(directory), SHOWN_STEPS + 1)  # a slow rank is still at the one before
    summary = summarize(run)
    if not summary.num_steps:
        return "\n".join(["No step of this run was finished.", *run.problems])
    lines = draw_lanes(run, max(width, LEAST_WIDTH))
    return "\n".join([*lines, "", LEGEND, "", *_say(run, summary), *run.problems])


def _say(run: Run, summary: Summary) -> list[str]:
    """Three sentences."""
    if summary.slowest is not None:
        last = say_slowest(summary, summary.slowest)
    else:
        only = summary.ranks[0]
        share = only.wait_secs / only.secs if only.secs > 0 else 0.0
        last = f"In its median step it computes {say_secs(only.compute_secs)} and waits {say_share(share)}."
    return [say_steps(run, summary), say_traffic(run, summary), last]


def draw_lanes(run: Run, width: int) -> list[str]:
    """A line of steps, one for each rank, and one of the time."""
    first = max(run.first_step, run.last_step - SHOWN_STEPS + 1)
    logs = [log for log in run.logs if any(step.step >= first for step in log.steps)]
    shown = [step for log in logs for step in log.steps if step.step >= first]
    start, end = min(step.start for step in shown), max(step.end for step in shown)
    names = [f"rank {log.rank}" for log in logs[:MOST_RANKS]]
    margin = max(map(len, names)) + 1
    num_cells = width - margin
    lines = [
        " " * margin + _head([step for step in logs[0].steps if step.step >= first], (start, end), num_cells)
    ]
    for name, log in zip(names, logs, strict=False):
        lines.append(name.ljust(margin) + _lane(log, run, (start, end), num_cells))
    if len(logs) > MOST_RANKS:
        lines.append(f"and {say_count(len(logs) - MOST_RANKS, 'rank')} more")
    length = say_secs(end - start)
    lines.append(" " * margin + "0" + length.rjust(num_cells - 1))
    return lines


def _head(steps: list[StepRow], within: Interval, num_cells: int) -> str:
    """The numbers of the steps, where the first rank begins them."""
    start, end = within
    head = [" "] * num_cells
    for step in steps:
        at = min(int((step.start - start) / (end - start) * num_cells), num_cells - 1)
        text = f"│step {step.step}"
        if at + len(text) <= num_cells:
            head[at : at + len(text)] = text
        else:
            head[at] = "│"
    return "".join(head).rstrip()


def _lane(log: RankLog, run: Run, within: Interval, num_cells: int) -> str:
    steps = [(step.start, step.end) for step in log.steps if run.first_step <= step.step <= run.last_step]
    waits = [(event.wait_start, event.end) for event in log.events if event.wait_start is not None]
    under_way = [(event.start, event.end) for event in log.events]
    start, end = within
    cell_secs = (end - start) / num_cells
    cells: list[str] = []
    for number in range(num_cells):
        cell = start + number * cell_secs, start + (number + 1) * cell_secs
        if covered_secs(steps, cell) < cell_secs / 2:
            cells.append(NOTHING)
        elif covered_secs(waits, cell) > cell_secs / 2:
            cells.append(WAITS)
        elif covered_secs(under_way, cell) > cell_secs / 2:
            cells.append(HIDES)
        else:
            cells.append(COMPUTES)
    return "".join(cells)
