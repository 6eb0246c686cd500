"""A run on disk: run.json says what it was, rank-00000.jsonl and so on what each rank did when.

run.json is written whole or not at all: to a file beside it, which then takes its place. A
rank's file grows by a few lines a step, so a run that was killed can be read up to its last
step. Times are those of time.perf_counter; a rank's first line ties them to the clock on the wall.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from weft.comm import Event
from weft.errors import ConfigError

FORMAT = 1
RUN_FILE = "run.json"
# Of a step's line. Beside them stand the scalars that the loop noted.
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


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file, to one beside it that then takes its place. Raises OSError with the path."""
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with beside.open("wb") as file:
                file.writelines(parts)
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _naming(error, path) from error


class RankFile:
    """The file of one rank, one JSON object a line."""

    def __init__(self, directory: Path, rank: int, device: str) -> None:
        self.path = directory / rank_file(rank)
        try:
            self._file: TextIO = self.path.open("w")
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

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines, for others to see at once. Raises OSError with the path."""
        try:
            self._file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            # Closed here, or Python would try to write the rest once more when it drops the file.
            with contextlib.suppress(OSError):
                self._file.close()
            raise _naming(error, self.path) from error

    def close(self) -> None:
        """Close the file. Raises OSError with its path where the last lines can't be written."""
        try:
            self._file.close()
        except OSError as error:
            raise _naming(error, self.path) from error


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


def _naming(error: OSError, path: Path) -> OSError:
    """The same error with the file's name: one that comes while data is written has none."""
    return type(error)(error.errno, error.strerror or str(error), str(path))
