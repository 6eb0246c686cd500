"""A canary: what Python does while a message is read, as its audit events tell."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

# What no message may lead to. Opening a file is among them; so is any import, also of what is there.
_DEADLY = ("exec", "compile", "import", "open", "os.", "subprocess.", "ctypes.", "socket.", "shutil.",
           "mmap.", "pty.", "fcntl.", "code.__new__", "function.__new__", "object.__setattr__",
           "object.__delattr__", "pickle.find_class", "marshal.", "urllib.", "sys.")  # fmt: skip

_heard: list[str] | None = None
_is_installed = False


def _hear(event: str, args: tuple[object, ...]) -> None:
    if _heard is not None and event.startswith(_DEADLY):
        _heard.append(f"{event} {args!r:.200}")


@contextlib.contextmanager
def canary() -> Generator[list[str]]:
    """The events that no message may lead to, as they happen inside. One thread at a time."""
    global _heard, _is_installed
    if not _is_installed:
        sys.addaudithook(_hear)  # for good: a hook can't be taken out
        _is_installed = True
    _heard = heard = []
    try:
        yield heard
    finally:
        _heard = None
