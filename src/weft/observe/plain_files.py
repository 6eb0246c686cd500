"""Read and write regular files in a folder that other programs may write to as well.

Symbolic links are not followed, pipes and devices are not read, and reads have a limit. A file is written
under a random name that did not exist, and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO

_NOT_FOLLOWED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_DEPTH = 32
MEBIBYTE = 2**20


def open_plain(path: Path | str, *, folder: int | None = None, write: bool = False) -> BinaryIO:
    """Open an existing regular file; `folder` is an open directory that the path is relative to.

    Raises OSError with a message for users, also for a link and for anything but a regular file.
    """
    flags = _NOT_FOLLOWED | (os.O_RDWR if write else os.O_RDONLY)
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "r+b" if write else "rb")


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[int]:
    """Open a directory for the block. Raises OSError for anything else, also for a link to one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_plain(path: Path | str, most: int, *, folder: int | None = None) -> bytes:
    """Read a file. Raises OSError as open_plain does, and for more than `most` bytes: none is read."""
    with open_plain(path, folder=folder) as file:
        is_larger = os.fstat(file.fileno()).st_size > most
        content = b"" if is_larger else file.read(most + 1)
    if is_larger or len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_json(path: Path | str, most: int = 16 * MEBIBYTE, *, folder: int | None = None) -> Any:
    """Read a JSON file; its texts have no surrogates that can't be encoded.

    Raises OSError as read_plain does, and ValueError for anything but JSON and for deep nesting.
    """
    try:
        return _plain(json.loads(read_plain(path, most, folder=folder).decode()), 0)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def plain_text(text: str) -> str:
    """The text without lone surrogates, which can't be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _plain(value: Any, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, list):
        return [_plain(one, depth + 1) for one in value]  # type: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {plain_text(name): _plain(one, depth + 1) for name, one in value.items()}  # type: ignore[reportUnknownVariableType]
    return value


def write_whole(path: Path, parts: Iterable[bytes], *, folder: int | None = None) -> None:
    """Write a file under a temporary name and rename it. Raises OSError with the path.

    A link of that name is replaced, not followed. `folder` is the open directory to write into, by default
    the path's parent.
    """
    if not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        if folder is not None:
            _write_into(folder, path.name, parts)
            return
        opened = os.open(path.parent, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write_into(opened, path.name, parts)
        finally:
            os.close(opened)
    except OSError as error:
        raise with_path(error, path) from error


def create_new(path: Path | str, *, folder: int | None = None) -> int:
    """Create a file to write to. Raises FileExistsError if the name exists."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666, dir_fd=folder)


def _write_into(folder: int, name: str, parts: Iterable[bytes]) -> None:
    beside = f".{name[:200]}.{secrets.token_hex(8)}"
    try:
        with open(create_new(beside, folder=folder), "wb") as file:
            file.writelines(parts)
        os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise


def with_path(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which errors of write() lack."""
    return type(error)(error.errno, error.strerror or str(error), str(path))
