"""Directories that a run is going to write to, checked before it begins."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import ConfigError
from weft.observe.plain_files import create_new


@contextmanager
def undone_on_error() -> Generator[list[Path]]:
    """Gives a list for directories that the block makes; those in it are removed again if it raises."""
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        for path in reversed(made):  # the innermost first
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise


def make_writable(directory: Path, what: str, made: list[Path]) -> None:
    """Make the directory, and write to it once; `made` gets what was not there before.

    Raises ConfigError, with what can't be written where, and why.
    """
    try:
        for path in reversed((directory, *directory.parents)):
            if not path.exists():
                path.mkdir(exist_ok=True)
                made.append(path)
        probe = directory / f".weft-probe-{secrets.token_hex(4)}"
        with open(create_new(probe), "wb") as file:
            file.write(b"weft")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"train: {what} can't be written to {directory}: {error.strerror or error}."
        ) from None
