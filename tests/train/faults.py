"""Runs that break while a checkpoint is written, inside ranks of a pool."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from weft.errors import ConfigError
from weft.training.job import run_rank
from weft.training.options import TrainOptions


def killed_in(point: str, options: TrainOptions) -> None:
    """Train, and die as the second checkpoint is written: behind this method of torch's writer."""
    with patch.object(FileSystemWriter, point, _at_second_call(getattr(FileSystemWriter, point), _die)):
        run_rank(options)


def out_of_space(point: str, rank: int, options: TrainOptions) -> str:
    """Train with a disk that is full for one rank's second checkpoint; gives the error that came of it."""
    if dist.get_rank() == rank:
        written = _at_second_call(getattr(FileSystemWriter, point), _find_no_space)
        with patch.object(FileSystemWriter, point, written):
            return _error_of(options)
    return _error_of(options)


def refused(runs: list[TrainOptions]) -> list[str]:
    """The errors of these runs, none of which may take a step."""
    return [_error_of(options) for options in runs]


def _error_of(options: TrainOptions) -> str:
    try:
        run_rank(options)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # told by its kind, so that the runs after it show as well
        return repr(error)
    return "it trained"


def _at_second_call(method: Callable[..., Any], happen: Callable[[], None]) -> Callable[..., Any]:
    calls: list[object] = []

    def patched(self: FileSystemWriter, *args: Any, **keywords: Any) -> Any:
        calls.append(self)
        # What is there by then stays on the disk: the end comes in the middle of a checkpoint.
        result = method(self, *args, **keywords)
        if len(calls) == 2:
            happen()
        return result

    return patched


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _find_no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
