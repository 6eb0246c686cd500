"""A lock for one run at a time in a folder. The kernel frees it when the process ends, by whatever death.

The file `.lock` names the process that holds it. It is removed with the lock; one that a killed process has
left is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import warnings
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

LOCK_FILE = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_mutex = threading.Lock()
# This process's locks: several of its objects may write to one folder in turns (a notebook cell run again).
_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """A lock that is held until `release`, or until the object is garbage-collected."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._pid = os.getpid()
        self.release = weakref.finalize(self, _release, descriptor, path, self._pid)

    @property
    def is_held(self) -> bool:
        """Whether this process still holds it. A forked child does not."""
        return self.release.alive and self._pid == os.getpid()


def acquire_folder(directory: Path) -> FolderLock | None:
    """Take the lock of a folder, or share the one that this process has.

    None, with a warning, where the file system has no locks. Raises ConfigError that names the holder.
    """
    found = os.stat(directory)
    with _mutex:
        mine = _held.get((found.st_dev, found.st_ino))
        if mine is not None and mine.is_held:
            return mine
        lock = _acquire(directory)
        if lock is not None:
            _held[found.st_dev, found.st_ino] = lock
        return lock


def check_free(directory: Path) -> None:
    """Raise ConfigError where another process holds the folder."""
    acquire_folder(directory)  # released at once, as nothing refers to it, unless it was held before


def _acquire(directory: Path) -> FolderLock | None:
    path = directory / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, _FLAGS, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} can't be locked: {error.strerror or error}.") from None
        try:
            if not lock_file(descriptor, directory):
                os.close(descriptor)
                return None
        except BlockingIOError:
            holder = describe_holder(os.pread(descriptor, 1000, 0))
            os.close(descriptor)
            raise ConfigError(held_message(directory, holder)) from None
        if _is_still_there(descriptor, path):
            _write_holder(descriptor)
            return FolderLock(descriptor, path)
        os.close(descriptor)  # the holder before has removed the file in between


def _is_still_there(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    return False


def _write_holder(descriptor: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    with suppress(OSError):  # no space left: the lock is valid without the text
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def lock_file(descriptor: int, what: Path) -> bool:
    """Lock an open file; False, with a warning, where the file system has no locks.

    Raises BlockingIOError where another process has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        warnings.warn(f"{what} can't be locked ({error.strerror}): start no second run in it.", stacklevel=4)
        return False
    return True


def held_message(what: Path, holder: str) -> str:
    """The message of the error for a folder that another process holds."""
    return (
        f"{what} is held by {holder}: two runs in one folder would mix up their files. Wait for the other "
        "one, end it, or take another folder."
    )


def describe_holder(content: bytes) -> str:
    """Describe the process that wrote these bytes, a JSON object with pid, host and since."""
    holder: Any = None
    with suppress(ValueError, RecursionError):
        holder = json.loads(content)
    if not isinstance(holder, dict) or type(holder.get("pid")) is not int:  # type: ignore[reportUnknownMemberType]
        return "another process"
    words = [f"process {holder['pid']:.0f}"]
    for preposition, name in (("on", "host"), ("since", "since")):
        if name in holder:
            words.append(f"{preposition} {re.sub(r'[^A-Za-z0-9.:+-]', '?', str(holder[name]))[:80]}")  # type: ignore[reportUnknownArgumentType]
    return " ".join(words)


def _release(descriptor: int, path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the lock is its parent's
    with suppress(OSError):
        if _is_still_there(descriptor, path):
            os.unlink(path)
    with suppress(OSError):
        os.close(descriptor)
