"""Watch a training loop: where each step's time went, and, in a directory, what happened when.

    observer = Observer(directory, {"strategy": "ddp"})
    for number in range(10):
        with observer.step(number) as step:
            with observer.span("forward"):
                loss = model(batch).mean()
            with observer.span("backward"):
                loss.backward()
            step.note(loss=loss.item(), tokens=batch.numel())
        print(step.figures.secs, step.figures.wait_secs)
    observer.close()

Each rank has an Observer of its own, thread-ranks too. It sees collectives that pass weft's door
while a step lasts. Without a directory it computes figures and writes nothing. A directory that
has a run in it gets the new one in its place.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import Events, record
from weft.errors import ConfigError, ConfigTypeError, StateError
from weft.observe.figures import StepFigures, make_figures
from weft.observe.run_files import (
    FORMAT,
    OWN_KEYS,
    RankFile,
    check_run_file,
    describe_resumed,
    event_line,
    in_file,
    make_directory,
    trim_surplus_files,
    write_run_file,
)
from weft.version import __version__

Line = dict[str, Any]


class Step:
    """A step under way, and its figures when it is over."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.scalars: dict[str, float] = {}
        self._figures: StepFigures | None = None

    def note(self, **scalars: float) -> None:
        """Keep numbers of this step: loss=, tokens= and any others. Noted again, the last one counts."""
        for name, value in scalars.items():
            if name in OWN_KEYS:
                raise ConfigError(f"step {self.number}: note({name}=...) would replace a figure; rename it.")
            try:
                self.scalars[name] = value if type(value) is int else float(value)
            except (TypeError, ValueError) as error:
                raise ConfigTypeError(
                    f"step {self.number}: note({name}=...) takes a number, got {type(value).__name__}."
                ) from error

    @property
    def figures(self) -> StepFigures:
        """Where the time went. Raises StateError until the step has ended."""
        if self._figures is None:
            raise StateError(f"step {self.number} has no figures: its block has not ended, or it raised.")
        return self._figures

    def finish(self, figures: StepFigures) -> None:
        """Say what came out, once."""
        self._figures = figures


class Observer:
    """Watches the steps of one rank. `about` goes into run.json, written by rank 0.

    With `go_on_at` the existing record is kept up to this step and continued. Raises ConfigError where
    another process records there, and for files of these names that no run has written.
    """

    def __init__(
        self, directory: Path | str | None, about: Mapping[str, Any], *, go_on_at: int | None = None
    ) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._directory = None if directory is None else Path(directory)
        self._about = {**_about_this_process(), **about}
        self._file: RankFile | None = None
        self._step: Step | None = None
        self._last_number: int | None = None
        self._lines: list[Line] = []  # of spans that were not written yet
        self._late: tuple[Events, int, int] | None = (
            None  # of the last step: how many are written, its number
        )
        if self._directory is not None:
            make_directory(self._directory)
            if self._rank == 0:
                check_run_file(self._directory)
            self._file = RankFile(self._directory, self._rank, _device_words(), go_on_at=go_on_at)
            if self._rank == 0:
                trim_surplus_files(self._directory, _num_ranks(), go_on_at)
                if go_on_at is not None:
                    self._about = describe_resumed(self._directory, go_on_at, self._about)
                write_run_file(self._directory, self._about)

    @contextmanager
    def step(self, number: int) -> Generator[Step]:
        """Watch one step. At its end what was seen is written, and its figures if all went well."""
        if self._step is not None:
            raise StateError(f"step {number} began within step {self._step.number}: end one before the next.")
        step = self._step = Step(number)
        start = time.perf_counter()
        events = Events()
        try:
            with record() as events:
                yield step
        except BaseException:
            with contextlib.suppress(OSError):  # the block's own error matters more
                self._write(events, number, [])
            raise
        finally:
            self._step, self._last_number = None, number
        end = time.perf_counter()
        figures = make_figures(number, (start, end), events, memory_bytes(), step.scalars)
        step.finish(figures)
        self._write(events, number, [_step_line(figures, start, end)])

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Say what the rank does in the block: forward, backward, optimizer, data, checkpoint."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._file is not None:
                number = self._last_number if self._step is None else self._step.number
                times = {"start": in_file(start), "end": in_file(time.perf_counter())}
                self._lines.append({"kind": "span", "name": name, "step": number, **times})

    def tell(self, **about: Any) -> None:
        """Add to run.json what was not known at the start: buckets=[...], say. Only rank 0's is written."""
        self._about.update(about)
        if self._directory is not None and self._rank == 0:
            write_run_file(self._directory, self._about)

    def close(self) -> None:
        """Write what is left and close the file. Harmless when called again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.write([*self._take_late(), *self._take_lines()])
            finally:
                file.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, events: Events, number: int, last: list[Line]) -> None:
        if self._file is None:
            return
        lines = self._take_late()
        seen = list(events)
        self._late = events, len(seen), number
        lines += [event_line(event, number) for event in seen]
        try:
            self._file.write([*lines, *self._take_lines(), *last])
        except OSError:
            self._file = None  # one report is enough: what follows could not be read without it
            raise

    def _take_late(self) -> list[Line]:
        """Collectives of the step before that were waited for after its end."""
        if self._late is None:
            return []
        (events, num_written, number), self._late = self._late, None
        return [event_line(event, number) for event in events[num_written:]]

    def _take_lines(self) -> list[Line]:
        lines, self._lines = self._lines, []
        return lines


def memory_bytes() -> int:
    """The most that torch had on the GPU, where one is used; else what the process has in memory now."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the most that it ever had, in kilobytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _step_line(figures: StepFigures, start: float, end: float) -> Line:
    return {
        "kind": "step",
        "step": figures.step,
        "start": in_file(start),
        "end": in_file(end),
        "compute_secs": in_file(figures.compute_secs),
        "comm_secs": in_file(figures.comm_secs),
        "wait_secs": in_file(figures.wait_secs),
        "bytes_in": figures.bytes_in,
        "memory_bytes": figures.memory_bytes,
        **figures.scalars,
    }


def _about_this_process() -> dict[str, Any]:
    num_ranks = _num_ranks()
    return {
        "format": FORMAT,
        "weft": __version__,
        "torch": torch.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "strategy": "",
        "ranks": num_ranks,
        "mesh": {"names": ["ranks"], "shape": [num_ranks]},
        "model": {},
        "options": {},
        "buckets": [],
    }


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _device_words() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
        return f"cuda:{number} ({torch.cuda.get_device_name(number)})"
    return "cpu"
