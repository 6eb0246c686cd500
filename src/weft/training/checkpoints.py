"""Checkpoints of a Trainer: written whole or not at all, kept N deep, loaded on any number of ranks.

A checkpoint is a directory `step-00000100` in torch's distributed format, with `about.json` beside it. It is
written under another name and renamed when every rank's part is on the disk, so what bears the name is whole.
What is in it is checkpoint_state.py's to say.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from weft.errors import ConfigError, WeftError
from weft.training.checkpoint_state import places_for, state_of, take
from weft.training.trainer import Trainer

T = TypeVar("T")
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".writing-"
_FULL_BYTES = 2**20  # a disk with less than this is full


class Checkpoints:
    """The checkpoints in a directory. Pass the same one to all ranks: they share its file system."""

    def __init__(self, directory: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"Checkpoints: keep must be at least 1; got {keep}.")
        self.directory = Path(directory)
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in order."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigError(
                f"train: checkpoints in {self.directory} can't be read: {error.strerror or error}."
            ) from None
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"step-{step:08}"

    def about(self, step: int) -> dict[str, Any]:
        """What the run said of itself when it wrote this checkpoint."""
        path = self.path_of(step) / "about.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise _damaged(self.path_of(step), error) from None

    def clean(self) -> None:
        """Remove what a run has left that was killed while it wrote. For one rank, before the others save."""
        for left in self.directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)

    def save(self, trainer: Trainer, about: Mapping[str, Any]) -> Path:
        """Write a checkpoint of the step that the trainer is at, and drop the oldest. All ranks call.

        Raises ConfigError on every rank, with the reason, when it can't be written; what was there stays.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import save

        whole = self.path_of(trainer.num_steps)
        unfinished = whole.with_name(f"{_UNFINISHED}{whole.name}")
        problem: str | None = None
        try:
            # Of what all ranks have, buffers say, the first one's is kept: it is what DDP goes on with.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            save(state_of(trainer), checkpoint_id=unfinished, planner=planner)
        except CheckpointException as error:
            problem = _first_cause(error, self.directory)
        if trainer.world.rank == 0 and problem is None:
            problem = _finish(unfinished, whole, about)
            for step in self.steps()[: -self._keep]:
                _remove(self.path_of(step))
        if trainer.world.rank == 0 and problem is not None:
            _remove(unfinished)  # before anybody raises, which may end this process
        problem = told_by_first(problem)
        if problem is not None:
            raise ConfigError(self._words_of(whole, problem))
        return whole

    def load(self, trainer: Trainer, step: int) -> bool:
        """Put the trainer where the checkpoint of a step was written, on as many ranks as there are now.

        Gives whether the state of a gradient hook was found: it belongs to one hook, strategy and number of
        ranks, and begins anew with others. All ranks call. Raises ConfigError where there is no such
        checkpoint, or it is of another model; the trainer is unchanged then.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        path = self.path_of(step)
        if not path.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ConfigError(f"train: there is no checkpoint {path}; there are those of steps: {there}.")
        try:
            reader = FileSystemReader(path)
            sizes = {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in reader.read_metadata().state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            places = places_for(trainer, sizes, f"the checkpoint {path}")
            load(places, storage_reader=reader)
            is_whole = take(trainer, places)
        except WeftError:
            raise
        except (Exception, CheckpointException) as error:  # whatever torch makes of a broken file
            raise _damaged(path, error) from error
        trainer.num_steps = step
        return is_whole

    def _words_of(self, whole: Path, problem: str) -> str:
        steps = self.steps()
        kept = f"The last whole one is of step {steps[-1]}" if steps else "There is none before it"
        return f"train: checkpoint {whole} could not be written: {problem}. {kept}; nothing of it is left."


def _finish(unfinished: Path, whole: Path, about: Mapping[str, Any]) -> str | None:
    """Give the checkpoint its name; says what went wrong."""
    try:
        with (unfinished / "about.json").open("w") as file:
            file.write(json.dumps(about, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if whole.exists():
            _remove(whole)
        os.replace(unfinished, whole)
        folder = os.open(whole.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def told_by_first(value: T) -> T:
    """What rank 0 says, on every rank: it alone looks at the directory, and renames."""
    told: list[Any] = [value]
    dist.broadcast_object_list(told, 0)
    return told[0]


def _remove(whole: Path) -> None:
    """Remove a checkpoint. It loses its name first: what bears one is whole, whenever the process ends."""
    unnamed = whole.with_name(f"{_UNFINISHED}old-{whole.name}")
    with suppress(OSError):
        os.replace(whole, unnamed)
        shutil.rmtree(unnamed, ignore_errors=True)


def _damaged(path: Path, error: BaseException) -> ConfigError:
    return ConfigError(
        f"train: the checkpoint {path} can't be loaded: {_first_line(error)}. It is damaged, or of another "
        "program; remove it to go on from the one before."
    )


def _first_cause(error: Any, directory: Path) -> str:
    """The first rank's reason out of a CheckpointException, in a line."""
    if shutil.disk_usage(directory).free < _FULL_BYTES:  # torch's writer doesn't say so
        return os.strerror(errno.ENOSPC)
    for rank, (cause, _) in sorted(error.failures.items()):
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else _first_line(cause)
        return f"rank {rank}: {text}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
