"""A run on disk: run.json describes it, rank-00000.jsonl and so on have each rank's events.

run.json is written whole or not at all: under a temporary name, which is then renamed. A
rank's file grows by a few lines a step, so a run that was killed can be read up to its last
step. Times are those of time.perf_counter; a rank's first line relates them to the wall clock.
A run that is resumed from a checkpoint drops the steps that it will make again, and adds such
a line of its own. Links are not followed, and files that no run has written are not removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from weft.comm import Event
from weft.errors import ConfigError
from weft.observe.folder_lock import describe_holder, held_message, lock_file
from weft.observe.plain_files import create_new, open_plain, read_json, with_path, write_whole

FORMAT = 1
RUN_FILE = "run.json"
MOST_RANKS = 2**16
MOST_LINE_BYTES = 2**20
# Of a step's line. All other keys are scalars that the loop noted.
OWN_KEYS = frozenset(
    ("kind", "step", "start", "end", "compute_secs", "comm_secs", "wait_secs", "bytes_in", "memory_bytes")
)


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.jsonl"


def make_directory(directory: Path) -> None:
    """Make the directory of a run. Raises ConfigError where nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can't record a run in {directory}: {error.strerror or error}. Give another one."
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"can't record a run in {directory}: it is not writable. Give another directory.")


def write_run_file(directory: Path, about: Mapping[str, Any]) -> None:
    """Write run.json, in place of the one that was there. Raises OSError with its path."""
    path = directory / RUN_FILE
    try:
        text = json.dumps(about, indent=1)
    except TypeError as error:
        raise ConfigError(f"can't write {path}: {error}. What is told about a run must be JSON.") from error
    write_whole(path, [f"{text}\n".encode()])


def check_run_file(directory: Path) -> None:
    """Raise ConfigError if the directory has a run.json that no run has written, rather than replace it."""
    try:
        about = read_json(directory / RUN_FILE)
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        about = None
    if not isinstance(about, dict) or type(about.get("format")) is not int:  # type: ignore[reportUnknownMemberType]
        raise ConfigError(
            f"can't record a run in {directory}: its {RUN_FILE} is not of a recorded run. Give another one."
        )


def describe_resumed(directory: Path, step: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a resumed run: the new one, with the start and the ranks of the earlier one."""
    try:
        found: Any = read_json(directory / RUN_FILE)
    except FileNotFoundError:
        return dict(about)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't go on with the record in {directory}: {RUN_FILE}: {error}.") from None
    resumed = found.get("resumed")
    steps = resumed if isinstance(resumed, list) else []
    ranks = found.get("ranks")
    most = max(about["ranks"], ranks) if type(ranks) is int and ranks <= MOST_RANKS else about["ranks"]
    started = {"started": found["started"]} if isinstance(found.get("started"), str) else {}
    return {**about, **started, "ranks": most, "resumed": [*steps[-100:], step]}


def trim_surplus_files(directory: Path, num_ranks: int, go_on_at: int | None) -> None:
    """Remove, or truncate at a step, files of ranks beyond this run's number of ranks."""
    for path in sorted(directory.glob("rank-*.jsonl")):
        number = path.name.removeprefix("rank-").removesuffix(".jsonl")
        if number.isdecimal() and len(number) < 9 and int(number) >= num_ranks:
            with _opened(path, int(number)) as file:
                if go_on_at is None:
                    path.unlink()
                else:
                    file.truncate(find_step_offset(file, path, go_on_at))


class RankFile:
    """The file of one rank, one JSON object a line, locked against a second run."""

    def __init__(self, directory: Path, rank: int, device: str, *, go_on_at: int | None = None) -> None:
        self.path = directory / rank_file(rank)
        try:
            self._file: TextIO = self._open(rank, go_on_at)
        except OSError as error:
            raise ConfigError(
                f"can't record rank {rank} in {self.path}: {error.strerror or error}."
            ) from error
        first = {
            "kind": "rank",
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device,
            "perf_secs": time.perf_counter(),
            "wall_secs": time.time(),
        }
        self.write([first])

    def _open(self, rank: int, go_on_at: int | None) -> TextIO:
        try:
            with _opened(self.path, rank) as there:
                if go_on_at is not None:
                    there.truncate(find_step_offset(there, self.path, go_on_at))
                    there.seek(0, os.SEEK_END)
                    return open(_locked(os.dup(there.fileno()), self.path), "w")
                self.path.unlink()
        except FileNotFoundError:
            pass
        return open(_locked(create_new(self.path), self.path), "w")

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines, for others to see at once. Raises OSError with the path."""
        try:
            self._file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            # Closed here, or Python would try to write the rest once more when it drops the file.
            with contextlib.suppress(OSError):
                self._file.close()
            raise with_path(error, self.path) from error

    def close(self) -> None:
        """Close the file. Raises OSError with its path where the last lines can't be written."""
        try:
            self._file.close()
        except OSError as error:
            raise with_path(error, self.path) from error


def _opened(path: Path, rank: int) -> BinaryIO:
    """Open and lock an existing file of a rank, to be replaced or continued.

    Raises ConfigError where another run writes to it, or where it is not a file of a rank.
    """
    file = open_plain(path, write=True)
    try:
        first = file.readline(1000)
        file.seek(0)
        if first and not first.startswith(b'{"kind":"rank"'):
            raise ConfigError(
                f"can't record rank {rank} in {path}: it is not of a recorded run. Give another directory."
            )
        try:
            lock_file(file.fileno(), path)
        except BlockingIOError:
            # An earlier run of this process that was not closed (in a notebook, say) may be replaced.
            if f'"pid":{os.getpid()},'.encode() not in first:
                raise ConfigError(held_message(path.parent, describe_holder(first))) from None
    except BaseException:
        file.close()
        raise
    return file


def _locked(descriptor: int, path: Path) -> int:
    """Lock a file for as long as it is open."""
    with contextlib.suppress(BlockingIOError):  # held by this process, by another descriptor
        lock_file(descriptor, path)
    return descriptor


def find_step_offset(file: BinaryIO, path: Path, step: int) -> int:
    """The offset in a rank's file at which this step's lines begin, or an incomplete last line."""
    end = 0
    while line := file.readline(MOST_LINE_BYTES):
        try:
            number = json.loads(line).get("step")
            is_whole = line.endswith(b"\n")
        except (ValueError, AttributeError, RecursionError):
            is_whole, number = False, None
        if not is_whole:
            if file.read(1):
                raise ConfigError(f"can't go on with {path}: it is damaged {end:,} bytes from its beginning.")
            break
        if type(number) is int and number >= step:
            break
        end = file.tell()
    return end


def event_line(event: Event, step: int | None) -> dict[str, Any]:
    """An event as it stands in a file; of what is no collective, less."""
    line: dict[str, Any] = {
        "kind": "note" if event.is_note else "event",
        "op": event.op,
        "feature": event.feature,
        "label": event.label,
    }
    if not event.is_note:
        wait_start = event.wait_start_secs
        line |= {
            "group": event.group,
            "group_size": event.group_size,
            "bytes_in": event.bytes_in,
            "bytes_out": event.bytes_out,
            "dtype": None if event.dtype is None else short_dtype(event.dtype),
            "wait_start": None if wait_start is None else in_file(wait_start),
            "wait_end": None if wait_start is None else in_file(event.end_secs),
            "error": event.error,
        }
    return line | {"start": in_file(event.start_secs), "end": in_file(event.end_secs), "step": step}


def short_dtype(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")


def in_file(secs: float) -> float:
    """A time as it is written: a tenth of a microsecond is enough."""
    return round(secs, 7)
