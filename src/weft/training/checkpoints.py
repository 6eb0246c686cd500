"""Checkpoints of a Trainer: written whole or not at all, kept N deep, loaded on any number of ranks.

A checkpoint is a directory `step-00000100` in torch's distributed format, with `about.json` beside it. It is
written under another name, about.json last, and renamed when every rank's part is on the disk, so a directory
of that name is whole. An existing one is renamed aside before and removed after: at every moment the step has
a checkpoint under its name, or one that `clean` restores. checkpoint_state.py decides what is in it, and
checkpoint_contents.py validates it. One process at a time writes to a directory (folder_lock.py).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.errors import ConfigError, WeftError
from weft.observe.folder_lock import FolderLock, acquire_folder
from weft.observe.plain_files import MEBIBYTE, opened_folder, read_json, write_whole
from weft.training.checkpoint_state import Loaded, apply_loaded, make_places, state_of, unpack_loaded
from weft.training.trainer import Trainer

T = TypeVar("T")
_ABOUT = "about.json"
_NAME = re.compile(r"step-(\d{8,18})")
# Prefixes of directories that are being written, were replaced by a new one, or are being removed.
_UNFINISHED, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"
_UNNAMED = re.compile(rf"(?:{re.escape(_UNFINISHED)}|{re.escape(_REPLACED)})(step-\d{{8,18}})(?:-[0-9a-f]+)?")
_FULL_BYTES = 2**20  # a disk with less than this is full


class Checkpoints:
    """The checkpoints in a directory. Pass the same one to all ranks: they share its file system.

    The first rank holds the directory's lock from its first `save`, or from `hold`, as long as this object
    lives: another process that writes there gets a ConfigError.
    """

    def __init__(self, directory: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"Checkpoints: keep must be at least 1; got {keep}.")
        self.directory = Path(directory)
        self._keep = keep
        self._lock: FolderLock | None = None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
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
        """The description of the run that wrote a checkpoint. Raises ConfigError if it is damaged."""
        path = self.path_of(step)
        try:
            with opened_folder(path) as folder:
                found = read_json(_ABOUT, MEBIBYTE, folder=folder)
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from None
        if not isinstance(found, dict):
            raise _damaged(path, ValueError(f"{_ABOUT} is not a JSON object"))
        return found  # type: ignore[reportUnknownVariableType]

    def hold(self) -> None:
        """Take the directory's lock, on one rank. Raises ConfigError that names the process that holds it."""
        if self._lock is None or not self._lock.is_held:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = acquire_folder(self.directory)

    def release(self) -> None:
        """Release the lock, so that others may write; the end of this object does so too."""
        self._lock = None

    def clean(self) -> None:
        """Tidy up after a run that was killed while it wrote. On one rank, which holds the directory.

        A complete checkpoint under a temporary name is renamed: nothing complete is lost.
        """
        found = {path.name: _UNNAMED.fullmatch(path.name) for path in _listed(self.directory)}
        # Unfinished ones first: they are newer than what they replace, and complete if they have about.json.
        for name, match in sorted(found.items(), key=lambda item: item[0].startswith(_REPLACED)):
            path = self.directory / name
            if match is None or path.is_symlink() or (self.directory / match[1]).exists():
                continue
            if (path / _ABOUT).is_file():
                os.rename(path, self.directory / match[1])
        for path in _listed(self.directory):
            if path.name.startswith((_UNFINISHED, _REPLACED, _REMOVED)):
                _remove_tree(path)

    def save(self, trainer: Trainer, about: Mapping[str, Any]) -> Path:
        """Write a checkpoint of the step that the trainer is at, and drop the oldest. All ranks call.

        Raises ConfigError on every rank, with the reason, when it can't be written; what was there stays.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import save

        whole = self.path_of(trainer.num_steps)
        is_first = trainer.world.rank == 0
        unfinished, problem = broadcast_from_first(self._begin(whole) if is_first else (None, None))
        if unfinished is None:
            raise ConfigError(problem)
        try:
            # Of replicated tensors (buffers, say) rank 0's is saved: DDP continues with that one.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            save(state_of(trainer), checkpoint_id=unfinished, planner=planner)
        except CheckpointException as error:
            problem = _first_cause(error, self.directory)
        if is_first and problem is None:
            problem = _finish(unfinished, whole, about)
            for step in self.steps()[: -self._keep]:
                _remove(self.path_of(step))
        if is_first and problem is not None:
            _remove_tree(unfinished)  # before any rank raises, which may end this process
        problem = broadcast_from_first(problem)
        if problem is not None:
            raise ConfigError(self._failure_message(whole, problem))
        return whole

    def _begin(self, whole: Path) -> tuple[Path | None, str | None]:
        """Take the lock and make a new directory, under a random name; returns it, or the problem."""
        unfinished = whole.with_name(f"{_UNFINISHED}{whole.name}-{secrets.token_hex(4)}")
        try:
            self.hold()
            unfinished.mkdir()
        except ConfigError as error:
            return None, str(error)
        except OSError as error:
            return None, self._failure_message(whole, error.strerror or str(error))
        return unfinished, None

    def load(self, trainer: Trainer, step: int) -> bool:
        """Restore the trainer from the checkpoint of a step, on any number of ranks.

        Returns False where a gradient hook's state was not found: it belongs to one hook, strategy and number
        of ranks, and is reset with others. All ranks call. Raises ConfigError where there is no such
        checkpoint, or it is damaged or of another model; the trainer is unchanged then.

        Loading runs no code of the checkpoint and reads no file outside of it.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from weft.training.checkpoint_contents import read_contents
        from weft.training.checkpoint_reader import PlainReader

        path = self.path_of(step)
        if not path.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ConfigError(f"train: there is no checkpoint {path}; there are those of steps: {there}.")
        with ExitStack() as opened:
            reader: PlainReader | None = None
            places: dict[str, torch.Tensor] = {}
            found: Loaded | None = None
            problem: str | None = None
            try:
                folder = opened.enter_context(opened_folder(path))
                contents = read_contents(folder)
                sizes = {name: (tensor.size, tensor.dtype) for name, tensor in contents.tensors.items()}
                places = make_places(trainer, sizes, f"the checkpoint {path}")
                reader = PlainReader(folder, contents)
            except (WeftError, OSError, ValueError, RuntimeError, MemoryError) as error:
                problem = str(error if isinstance(error, WeftError) else _damaged(path, error))
            _raise_first_problem(problem)  # on all ranks together: load() calls collectives
            try:
                load(places, storage_reader=reader)
                found = unpack_loaded(trainer, places)
            except CheckpointException as error:
                problem = str(_damaged(path, _cause(error)))
            except Exception as error:  # whatever torch makes of it
                problem = str(_damaged(path, error))
            _raise_first_problem(problem)
        assert found is not None
        is_whole = False
        try:
            is_whole = apply_loaded(trainer, found)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            problem = str(_damaged(path, error))  # from a hook's state, before anything has changed
        # Also a barrier: with remote parts a rank must not meet another's old parameters.
        _raise_first_problem(problem)
        trainer.num_steps = step
        return is_whole

    def _failure_message(self, whole: Path, problem: str) -> str:
        steps = self.steps()
        kept = f"The last whole one is of step {steps[-1]}" if steps else "There is none before it"
        return f"train: checkpoint {whole} could not be written: {problem}. {kept}; nothing of it is left."


def _finish(unfinished: Path, whole: Path, about: Mapping[str, Any]) -> str | None:
    """Rename the checkpoint to its final name; returns the problem, if any."""
    replaced: Path | None = None
    try:
        write_whole(unfinished / _ABOUT, [json.dumps(about, indent=2).encode(), b"\n"])
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        if whole.exists() or whole.is_symlink():
            replaced = whole.with_name(f"{_REPLACED}{whole.name}-{secrets.token_hex(4)}")
            os.rename(whole, replaced)
        try:
            os.rename(unfinished, whole)
        except OSError:
            if replaced is not None:
                os.rename(replaced, whole)
            raise
        _sync(whole.parent)
    except OSError as error:
        return error.strerror or str(error)
    if replaced is not None:
        _remove_tree(replaced)
    return None


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk, so that it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def broadcast_from_first(value: T) -> T:
    """Broadcast rank 0's value: it alone reads and renames in the directory."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _raise_first_problem(problem: str | None) -> None:
    """Raise ConfigError on every rank if any rank has a problem; the message is the first one's."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for one in problems:
        if one is not None:
            raise ConfigError(one)


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(whole: Path) -> None:
    """Remove a checkpoint. Renamed first: one under its name is complete, whenever the process ends."""
    unnamed = whole.with_name(f"{_REMOVED}{whole.name}-{secrets.token_hex(4)}")
    with suppress(OSError):
        os.rename(whole, unnamed)
        _remove_tree(unnamed)


def _remove_tree(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _damaged(path: Path, error: BaseException) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
    where = f"{Path(str(error.filename)).name}: " if isinstance(error, OSError) and error.filename else ""
    return ConfigError(
        f"train: the checkpoint {path} can't be loaded: {where}{reason}. It is damaged, or of another "
        "program; remove it to resume from the one before."
    )


def _cause(error: Any) -> BaseException:
    """The first rank's reason out of a CheckpointException."""
    for _, (cause, _) in sorted(error.failures.items()):
        return cause
    return error


def _first_cause(error: Any, directory: Path) -> str:
    """The first rank's reason out of a CheckpointException, in a line."""
    if shutil.disk_usage(directory).free < _FULL_BYTES:  # torch's writer doesn't say so
        return os.strerror(errno.ENOSPC)
    for rank, (cause, _) in sorted(error.failures.items()):
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else _first_line(cause)
        return f"rank {rank}: {text}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
