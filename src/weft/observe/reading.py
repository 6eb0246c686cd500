"""Read a recorded run. What happened in chosen steps is kept whole, of all steps what adds up.

A run may have been killed: the last line of a rank's file is then half a line, which is left out
and said in `problems`, and so are ranks without a file. Any other damage raises ConfigError with
the file and the line. Times are seconds on one clock for all ranks: the day's, brought to each
host's time.perf_counter by what its first rank wrote at its start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.observe.figures import Interval, covered_secs
from weft.observe.quantities import say_ranks
from weft.observe.run_files import FORMAT, OWN_KEYS, RUN_FILE, rank_file

_decode = json.JSONDecoder().decode  # json.loads would guess the encoding of each line
_ALWAYS = -math.inf, math.inf
_KINDS = ("rank", "span", "event", "note", "step")


@dataclass(frozen=True, slots=True)
class SpanRow:
    """What a rank did for a while."""

    name: str
    step: int | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class EventRow:
    """One collective of one rank."""

    op: str
    feature: str
    label: str
    group_size: int
    bytes_in: int
    bytes_out: int
    dtype: str
    start: float
    end: float
    wait_start: float | None
    error: str | None
    step: int | None

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.op} {self.label}".strip()

    @property
    def wait_secs(self) -> float:
        """How long the rank stood still for it."""
        return 0.0 if self.wait_start is None else max(self.end - self.wait_start, 0.0)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one rank."""

    step: int
    start: float
    end: float
    compute_secs: float
    comm_secs: float
    wait_secs: float
    memory_bytes: int
    scalars: dict[str, float]

    @property
    def secs(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(slots=True)
class Traffic:
    """What collectives of one kind come to, over all steps of a rank."""

    num_calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    wait_secs: float = 0.0

    def add(self, other: Traffic) -> None:
        """Count another's too."""
        self.num_calls += other.num_calls
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.wait_secs += other.wait_secs


class Busy:
    """How long collectives of one kind were under way, and waited for. What overlaps counts once."""

    __slots__ = ("_times", "_waits", "secs", "wait_secs")

    def __init__(self) -> None:
        self.secs = self.wait_secs = 0.0
        self._times: list[Interval] = []  # since the last `settle`
        self._waits: list[Interval] = []

    def add(self, event: EventRow) -> None:
        """Count one in."""
        self._times.append((event.start, event.end))
        if event.wait_start is not None:
            self._waits.append((event.wait_start, event.end))

    def settle(self) -> None:
        """Add up what has come. Called now and then, so that a long run's times are not all kept."""
        self.secs += covered_secs(self._times, _ALWAYS)
        self.wait_secs += covered_secs(self._waits, _ALWAYS)
        self._times, self._waits = [], []


Kind = tuple[str, str, str]  # feature, op, label


@dataclass(slots=True)
class RankLog:
    """What one rank wrote."""

    rank: int
    host: str
    device: str
    clock: float  # what its times are behind the day's
    steps: list[StepRow] = field(default_factory=list[StepRow])
    spans: list[SpanRow] = field(default_factory=list[SpanRow])  # of the chosen steps
    events: list[EventRow] = field(default_factory=list[EventRow])  # of the chosen steps
    traffic: dict[Kind, Traffic] = field(default_factory=dict[Kind, Traffic])  # of all steps
    busy: dict[tuple[str, str], Busy] = field(default_factory=dict[tuple[str, str], Busy])  # by feature, op
    errors: list[str] = field(default_factory=list[str])  # of collectives that failed


@dataclass(slots=True)
class Run:
    """A recorded run."""

    directory: Path
    about: dict[str, Any]
    logs: list[RankLog]  # of the ranks that are there, in order
    first_step: int  # the chosen steps: from this one
    last_step: int  # to this one
    problems: list[str]  # what is missing, in sentences

    @property
    def num_ranks(self) -> int:
        """How many ranks the run had, those without a file too."""
        return self.about["ranks"]


def read_run(directory: Path, steps: tuple[int | None, int | None] | int = 20) -> Run:
    """Read the run in a directory.

    `steps` chooses those whose spans and events are kept: so many last ones, or from one up to, and
    without, another; None is the run's end on that side.
    """
    about = read_about(directory)
    problems: list[str] = []
    paths = {rank: directory / rank_file(rank) for rank in range(about["ranks"])}
    found = {rank: path for rank, path in paths.items() if path.exists()}
    missing = [rank for rank in paths if rank not in found]
    numbers = [number for path in found.values() for number in _step_numbers(path)]
    first, last = _choose(steps, numbers)
    logs: list[RankLog] = []
    clocks: dict[str, float] = {}
    for rank, path in found.items():
        log = _read_rank(path, rank, (first, last), clocks, problems)
        if log is None:
            missing.append(rank)
        else:
            logs.append(log)
    if missing:
        which = f"{'Rank' if len(missing) == 1 else 'Ranks'} {say_ranks(sorted(missing))}"
        problems.insert(0, f"{which} of {len(paths)} left no record.")
    if not logs:
        raise ConfigError(f"{directory} has no record of any rank: the run ended before it began.")
    if len(clocks) > 1:
        problems.append(
            f"The ranks ran on {len(clocks)} hosts. Their times are compared by the hosts' clocks, which may "
            "differ by some milliseconds."
        )
    return Run(directory, about, logs, first, last, problems)


def read_about(directory: Path) -> dict[str, Any]:
    """What run.json says. Raises ConfigError where it isn't one."""
    path = directory / RUN_FILE
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory. Give the one that a run was recorded in.")
    try:
        about = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} has no {RUN_FILE}: no run was recorded there.") from error
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        seen = about.get("format") if isinstance(about, dict) else None
        raise ConfigError(f"{path} has format {seen!r}; this weft reads format {FORMAT}.")
    num_ranks = about.get("ranks")
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ConfigError(f"{path} is damaged: ranks is {num_ranks!r}.")
    return about


def _step_numbers(path: Path) -> Iterator[int]:
    """The steps that a file tells of, by a look at the lines of steps only. Damage is found later."""
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"kind":"step"'):
                try:
                    yield int(json.loads(line)["step"])
                except (ValueError, KeyError, TypeError):
                    continue


def _choose(steps: tuple[int | None, int | None] | int, numbers: list[int]) -> tuple[int, int]:
    """The first and the last of the chosen steps."""
    lowest, highest = min(numbers, default=0), max(numbers, default=0)
    if isinstance(steps, int):
        return max(highest - steps + 1, lowest), highest
    first = lowest if steps[0] is None else steps[0]
    last = highest if steps[1] is None else steps[1] - 1
    if numbers and not any(first <= number <= last for number in numbers):
        raise ConfigError(f"no step is in {first}:{last + 1}; the run has steps {lowest} to {highest}.")
    return first, last


def _read_rank(
    path: Path, rank: int, chosen: tuple[int, int], clocks: dict[str, float], problems: list[str]
) -> RankLog | None:
    """One rank's file; None when it has no whole line."""
    log: RankLog | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    values = _decode(line.decode())
                    if log is None:
                        log = _open_log(values, rank, clocks)
                    else:
                        _take(values, log, chosen)
                except (ValueError, KeyError, TypeError) as error:
                    if not file.read(1):
                        problems.append(f"The last line of {path.name} is damaged and was left out.")
                        break
                    raise ConfigError(f"{path}:{number} is damaged: {_reason(error)}.") from error
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}.") from error
    for busy in () if log is None else log.busy.values():
        busy.settle()
    return log


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return f"it is no JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


def _open_log(values: Any, rank: int, clocks: dict[str, float]) -> RankLog:
    if _kind(values) != "rank" or values["rank"] != rank:
        raise ValueError(f"a file begins with its rank, which is {rank}")
    host = _text(values, "host")
    clock = clocks.setdefault(host, _number(values, "wall_secs") - _number(values, "perf_secs"))
    return RankLog(rank, host, _text(values, "device"), clock)


def _take(values: Any, log: RankLog, chosen: tuple[int, int]) -> None:
    """Put a line where it belongs."""
    kind = _kind(values)
    if kind == "step":
        log.steps.append(_step(values, log.clock))
        for busy in log.busy.values():
            busy.settle()
    elif kind == "span":
        if _is_chosen(values["step"], chosen):
            start, end = _times(values, log.clock)
            log.spans.append(SpanRow(_text(values, "name"), values["step"], start, end))
    elif kind == "event":
        event = _event(values, log.clock)
        kind_of_event = event.feature, event.op, event.label
        traffic = log.traffic.setdefault(kind_of_event, Traffic())
        traffic.add(Traffic(1, event.bytes_in, event.bytes_out, event.wait_secs))
        log.busy.setdefault((event.feature, event.op), Busy()).add(event)
        if event.error is not None:
            log.errors.append(f"{event.name}: {event.error}")
        if _is_chosen(event.step, chosen):
            log.events.append(event)


def _kind(values: Any) -> str:
    kind = values["kind"]
    if kind not in _KINDS:
        raise ValueError(f"it is of kind {kind!r}")
    return kind


def _is_chosen(step: Any, chosen: tuple[int, int]) -> bool:
    return isinstance(step, int) and chosen[0] <= step <= chosen[1]


def _event(values: dict[str, Any], clock: float) -> EventRow:
    start, end = _times(values, clock)
    return EventRow(
        op=_text(values, "op"),
        feature=_text(values, "feature"),
        label=_text(values, "label"),
        group_size=int(_number(values, "group_size")),
        bytes_in=int(_number(values, "bytes_in")),
        bytes_out=int(_number(values, "bytes_out")),
        dtype=values["dtype"] or "",
        start=start,
        end=end,
        wait_start=None if values["wait_start"] is None else _number(values, "wait_start") + clock,
        error=values["error"],
        step=values["step"],
    )


def _step(values: dict[str, Any], clock: float) -> StepRow:
    start, end = _times(values, clock)
    return StepRow(
        step=int(_number(values, "step")),
        start=start,
        end=end,
        compute_secs=_number(values, "compute_secs"),
        comm_secs=_number(values, "comm_secs"),
        wait_secs=_number(values, "wait_secs"),
        memory_bytes=int(_number(values, "memory_bytes")),
        scalars={
            name: float(value)
            for name, value in values.items()
            if name not in OWN_KEYS and isinstance(value, int | float)
        },
    )


def _times(values: dict[str, Any], clock: float) -> tuple[float, float]:
    start, end = _number(values, "start"), _number(values, "end")
    if end < start:
        raise ValueError(f"it ends at {end}, before it starts, at {start}")
    return start + clock, end + clock


def _number(values: dict[str, Any], key: str) -> float:
    value = values[key]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, which is no number")
    return value


def _text(values: dict[str, Any], key: str) -> str:
    value = values[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, which is no text")
    return value
