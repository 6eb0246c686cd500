"""How a run shows itself while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Protocol, Self

from weft.observe import StepFigures

_NUM_RECENT = 20  # steps that the shown figures are means over
_NUM_LINES = 20  # of a whole run, where there is no terminal
_QUIET_SECS = 10.0  # without a line, at most


class Progress(Protocol):
    """Shows a run. Use as a context manager: a bar must be taken down before anything else is printed."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, *error: object) -> None:
        """Take down what is shown."""
        ...

    def show(self, num_done: int, figures: StepFigures) -> None:
        """Show that this many steps are done, and how the last one went."""
        ...

    def say(self, line: str) -> None:
        """Print a line of its own."""
        ...


def make_progress(num_steps: int, *, is_shown: bool) -> Progress:
    """What suits the output: nothing on ranks that don't show, a bar on a terminal, lines elsewhere."""
    if not is_shown:
        return _Silent()
    return _Bar(num_steps) if sys.stdout.isatty() else _Lines(num_steps)


class Recent:
    """Means over the last steps: single ones jump too much to read."""

    def __init__(self) -> None:
        self._figures: deque[StepFigures] = deque(maxlen=_NUM_RECENT)

    def words(self, figures: StepFigures) -> dict[str, str]:
        """Take in a step, and give what is shown, by name."""
        self._figures.append(figures)
        secs = sum(one.secs for one in self._figures)
        waited = sum(one.wait_secs for one in self._figures)
        under_way = sum(one.comm_secs for one in self._figures)
        tokens = sum(one.scalars["tokens"] for one in self._figures)
        return {
            "loss": f"{figures.scalars['loss']:.4f}",
            "tokens/s": f"{tokens / secs:,.0f}",
            "compute": f"{(secs - waited) / len(self._figures) * 1e3:.1f} ms",
            "communication": f"{under_way / len(self._figures) * 1e3:.1f} ms",
            "waiting": f"{waited / len(self._figures) * 1e3:.1f} ms",
            "memory": f"{figures.memory_bytes / 2**20:,.0f} MB",
        }


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, num_done: int, figures: StepFigures) -> None:
        pass

    def say(self, line: str) -> None:
        pass


class _Lines:
    """A line now and then."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._every = max(1, num_steps // _NUM_LINES)
        self._shown_at = time.monotonic()
        self._recent = Recent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, num_done: int, figures: StepFigures) -> None:
        words = self._recent.words(figures)
        is_due = num_done % self._every == 0 or time.monotonic() - self._shown_at >= _QUIET_SECS
        if is_due or num_done in (1, self._num_steps):
            self._shown_at = time.monotonic()
            width = len(str(self._num_steps))
            shown = "  ".join(f"{name} {value}" for name, value in words.items())
            self.say(f"step {num_done:{width}}/{self._num_steps}  {shown}")

    def say(self, line: str) -> None:
        print(line, flush=True)


class _Bar:
    """rich's progress bar."""

    def __init__(self, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
        )
        self._task: Any = self._bar.add_task("steps", total=num_steps, words="")
        self._recent = Recent()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, num_done: int, figures: StepFigures) -> None:
        words = "  ".join(f"{name} [b]{value}[/b]" for name, value in self._recent.words(figures).items())
        self._bar.update(self._task, completed=num_done, words=words)

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)
