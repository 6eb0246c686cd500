"""Read a recorded run. What happened in chosen steps is kept whole, of all steps what adds up.

A run may have been killed: the last line of a rank's file is then half a line, which is left out
and listed in `problems`, and so are ranks without a file. Any other damage raises ConfigError with
the file and the line: fields.py checks the values. Times are seconds on one clock for all
ranks: the day's, brought to each host's time.perf_counter by what its first rank wrote at its start,
or when the run was resumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import ConfigError
from weft.observe import fields
from weft.observe.figures import Interval, covered_secs
from weft.observe.plain_files import open_plain, read_json
from weft.observe.quantities import say_ranks
from weft.observe.run_files import FORMAT, MOST_LINE_BYTES, RUN_FILE, rank_file

_decode = json.JSONDecoder().decode  # json.loads would guess the encoding of each line
_ALWAYS = -math.inf, math.inf
_SAME_CLOCK_SECS = 1.0  # ranks of a host differ by less, restarts of a host by more
MOST_DRAWN = 200_000  # spans, or collectives, of a rank that a page can hold


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
    unsettled: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])  # of `busy`
    num_left_out: int = 0  # spans and events that are too many to keep


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
    first, last = _choose(steps, numbers, about["resumed"])
    logs: list[RankLog] = []
    clocks: dict[str, list[float]] = {}
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
    problems += [
        f"Rank {log.rank} did more in these steps than a page can hold: {log.num_left_out:,} spans and "
        "collectives are not in the timeline. Choose fewer with --steps A:B."
        for log in logs
        if log.num_left_out
    ]
    if len(clocks) > 1:  # by host
        problems.append(
            f"The ranks ran on {len(clocks)} hosts. Their times are compared by the hosts' clocks, which may "
            "differ by some milliseconds."
        )
    return Run(directory, about, logs, first, last, problems)


def read_about(directory: Path) -> dict[str, Any]:
    """Read and validate run.json. Raises ConfigError where it is missing or damaged."""
    path = directory / RUN_FILE
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory. Give the one that a run was recorded in.")
    try:
        about = read_json(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} has no {RUN_FILE}: no run was recorded there.") from error
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from error
    seen: Any = about.get("format") if isinstance(about, dict) else None  # type: ignore[reportUnknownMemberType]
    if type(seen) is not int or seen != FORMAT:
        raise ConfigError(f"{path} has format {seen!r:.60}; this weft reads format {FORMAT}.")
    try:
        return fields.about_run(about)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from error


def _lines(path: Path) -> Iterator[tuple[bytes, BinaryIO]]:
    """The lines of a file, and the file. Raises ConfigError if it can't be read, or a line is too long."""
    try:
        with open_plain(path) as file:
            while line := file.readline(MOST_LINE_BYTES):
                if len(line) == MOST_LINE_BYTES:
                    raise ConfigError(f"{path} is damaged: a line has more than {MOST_LINE_BYTES:,} bytes.")
                yield line, file
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}.") from error


def _step_numbers(path: Path) -> Iterator[int]:
    """The numbers of the steps in a file. Only lines of steps are decoded; damage is found later."""
    for line, _ in _lines(path):
        if line.startswith(b'{"kind":"step"'):
            try:
                yield fields.step_number(fields.mapping(json.loads(line)))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue


def _choose(
    steps: tuple[int | None, int | None] | int, numbers: list[int], resumed: list[int]
) -> tuple[int, int]:
    """The first and the last of the chosen steps. The last few don't reach back beyond a break of the run."""
    lowest, highest = min(numbers, default=0), max(numbers, default=0)
    if isinstance(steps, int):
        breaks = [step for step in resumed if lowest <= step <= highest]
        return max(highest - steps + 1, lowest, *breaks), highest
    first = lowest if steps[0] is None else steps[0]
    last = highest if steps[1] is None else steps[1] - 1
    if numbers and not any(first <= number <= last for number in numbers):
        raise ConfigError(f"no step is in {first}:{last + 1}; the run has steps {lowest} to {highest}.")
    return first, last


def _read_rank(
    path: Path, rank: int, chosen: tuple[int, int], clocks: dict[str, list[float]], problems: list[str]
) -> RankLog | None:
    """One rank's file; None when it has no whole line."""
    log: RankLog | None = None
    for number, (line, file) in enumerate(_lines(path), 1):
        try:
            values = fields.mapping(_decode(line.decode()))
            if log is None:
                log = _open_log(values, rank, clocks)
            else:
                _take(values, log, chosen, clocks)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not file.read(1):
                problems.append(f"The last line of {path.name} is damaged and was left out.")
                break
            raise ConfigError(f"{path}:{number} is damaged: {_reason(error)}.") from error
    for busy in () if log is None else log.busy.values():
        busy.settle()
    return log


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return f"it is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)


def _open_log(values: dict[str, Any], rank: int, clocks: dict[str, list[float]]) -> RankLog:
    if values["kind"] != "rank" or values["rank"] != rank:
        raise ValueError(f"a file begins with its rank, which is {rank}")
    log = RankLog(rank, "", "", 0.0)
    _begin(values, log, clocks)
    return log


def _begin(values: dict[str, Any], log: RankLog, clocks: dict[str, list[float]]) -> None:
    """Read a rank's first line, or the one that a resumed run has added."""
    log.host, log.device = fields.text(values, "host"), fields.text(values, "device")
    clock = fields.secs(values, "wall_secs") - fields.secs(values, "perf_secs")
    known = clocks.setdefault(log.host, [])
    log.clock = next((one for one in known[-100:] if abs(one - clock) < _SAME_CLOCK_SECS), clock)
    if log.clock not in known[-100:]:
        known.append(log.clock)


def _take(
    values: dict[str, Any], log: RankLog, chosen: tuple[int, int], clocks: dict[str, list[float]]
) -> None:
    """Add a line to the log."""
    kind = values["kind"]
    if kind == "event":
        event = _event(values, log.clock)
        kind_of_event = event.feature, event.op, event.label
        traffic = log.traffic.setdefault(kind_of_event, Traffic())
        traffic.add(Traffic(1, event.bytes_in, event.bytes_out, event.wait_secs))
        of_op = event.feature, event.op
        log.busy.setdefault(of_op, Busy()).add(event)
        log.unsettled.add(of_op)
        if event.error is not None:
            log.errors.append(f"{event.name}: {event.error}")
        if _is_chosen(event.step, chosen):
            _keep(event, log.events, log)
    elif kind == "step":
        log.steps.append(_step(values, log.clock))
        for of_op in log.unsettled:
            log.busy[of_op].settle()
        log.unsettled.clear()
    elif kind == "span":
        step = fields.optional_step(values)
        start, end = _times(values, log.clock)
        if _is_chosen(step, chosen):
            _keep(SpanRow(fields.text(values, "name"), step, start, end), log.spans, log)
    elif kind == "rank":
        _begin(values, log, clocks)
    elif kind != "note":
        raise ValueError(f"its kind is {kind!r:.60}, which is unknown")


def _keep(row: Any, rows: list[Any], log: RankLog) -> None:
    if len(rows) < MOST_DRAWN:
        rows.append(row)
    else:
        log.num_left_out += 1


def _is_chosen(step: int | None, chosen: tuple[int, int]) -> bool:
    return step is not None and chosen[0] <= step <= chosen[1]


def _event(values: dict[str, Any], clock: float) -> EventRow:
    start, end = _times(values, clock)
    return EventRow(
        op=fields.text(values, "op"),
        feature=fields.text(values, "feature"),
        label=fields.text(values, "label"),
        group_size=fields.count(values, "group_size"),
        bytes_in=fields.count(values, "bytes_in"),
        bytes_out=fields.count(values, "bytes_out"),
        dtype=fields.optional_text(values, "dtype") or "",
        start=start,
        end=end,
        wait_start=None if values["wait_start"] is None else fields.secs(values, "wait_start") + clock,
        error=fields.optional_text(values, "error"),
        step=fields.optional_step(values),
    )


def _step(values: dict[str, Any], clock: float) -> StepRow:
    start, end = _times(values, clock)
    return StepRow(
        step=fields.step_number(values),
        start=start,
        end=end,
        compute_secs=fields.secs(values, "compute_secs"),
        comm_secs=fields.secs(values, "comm_secs"),
        wait_secs=fields.secs(values, "wait_secs"),
        memory_bytes=fields.count(values, "memory_bytes"),
        scalars=fields.scalars(values),
    )


def _times(values: dict[str, Any], clock: float) -> tuple[float, float]:
    start, end = fields.secs(values, "start"), fields.secs(values, "end")
    if end < start:
        raise ValueError(f"it ends at {end}, before it starts, at {start}")
    return start + clock, end + clock
