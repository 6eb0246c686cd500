"""Shared memory of another process of this user, opened by descriptor and checked before use.

A peer names memory by numbers and never by a path: process id, descriptor, inode and length. False numbers
lead, at most, to a memfd that a process of this same user created under the name of its kind and sealed: it
can't be shrunk while it is mapped (which would be a SIGBUS here), and no other user can own it. Memory that
is opened to write counters into has a kind of its own (`weft-ring`): no other can be passed off as it.

Invariant: a process is checked before its descriptor is opened, and the opened file before it is returned.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from weft.errors import TamperedError
from weft.trust.numbers import check_integer

# Neither the length of a sealed memfd nor its seals can change any more.
SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW; fcntl has these names on Linux only
MEMORY_NAME = "weft"

MAX_PID = 1 << 22  # the kernel's own limit on 64-bit machines
_MAX_FD = (1 << 31) - 1
_MAX_INODE = (1 << 64) - 1
_MAX_BYTES = 1 << 47  # the size of a process's address space


def seal_memory(fd: int, seals: int = SEALS) -> None:
    """Fix the length of a memfd for good. It must have been made with MFD_ALLOW_SEALING."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def open_peer_memory(pid: int, fd: int, inode: int, num_bytes: int, kind: str = MEMORY_NAME) -> int:
    """Open the sealed memfd of another process of this user, for reading and writing; the caller closes it.

    `kind` is the name that it was created under.

    Raises TamperedError for numbers out of range and for memory of another user, of another length or without
    the seals; FileNotFoundError when the process or its descriptor is gone; OSError (ESTALE) when the
    descriptor refers to something else by now; PermissionError when the process is undumpable.
    """
    check_integer(num_bytes, "the length of a peer's shared memory", 1, _MAX_BYTES)
    return open_memfd((pid, fd, inode), num_bytes, kind, SEALS, os.O_RDWR)


def open_memfd(place: tuple[int, int, int], num_bytes: int, name: str, seals: int, mode: int) -> int:
    """Open the memfd at (pid, fd, inode) if it has this name, length and seals; else as open_peer_memory."""
    pid = check_integer(place[0], "a peer's process id", 1, MAX_PID)
    fd = check_integer(place[1], "a peer's file descriptor", 0, _MAX_FD)
    inode = check_integer(place[2], "the inode of a peer's shared memory", 1, _MAX_INODE)
    what = f"the shared memory at descriptor {fd} of process {pid}"
    check_process(pid, what)
    path = f"/proc/{pid}/fd/{fd}"
    # Checked before it is opened: opening a device can have side effects.
    _check_link(path, name, what)
    opened = os.open(path, mode | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        _check_link(f"/proc/self/fd/{opened}", name, what)  # it may have been replaced in between
        _check_file(opened, inode, num_bytes, seals, what)
    except BaseException:
        os.close(opened)
        raise
    return opened


def check_process(pid: int, what: str) -> None:
    """Raise TamperedError unless a process is this user's, FileNotFoundError where it does not exist."""
    owner = os.stat(f"/proc/{pid}").st_uid
    if owner == os.geteuid():
        return
    if owner == 0:  # the kernel also shows an undumpable process of this user as root's
        raise PermissionError(errno.EACCES, f"{what} belongs to a process that is root's or undumpable")
    raise _refusal(what, f"is of user {owner}, and this is user {os.geteuid()}")


def _check_link(path: str, name: str, what: str) -> None:
    link = os.readlink(path)
    if link.removesuffix(" (deleted)") != f"/memfd:{name}":
        raise OSError(
            errno.ESTALE, f"{what} is not shared memory of weft, '{name}': it refers to {link[:200]!r}"
        )


def _check_file(fd: int, inode: int, num_bytes: int, seals: int, what: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _refusal(what, f"is a file of user {status.st_uid}, and this is user {os.geteuid()}")
    if status.st_ino != inode:
        raise OSError(errno.ESTALE, f"{what} has been replaced: its inode is {status.st_ino}, not {inode}")
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd, in spite of its name
        found = 0
    if found & seals != seals:
        raise _refusal(what, "can still change its length: it lacks the seals that weft sets")
    if status.st_size != num_bytes:
        raise _refusal(what, f"has {status.st_size} bytes, not {num_bytes}")


def _refusal(what: str, problem: str) -> TamperedError:
    return TamperedError(
        f"{what} {problem}. It was not used. All ranks of a group must run as one user; if yours do, find "
        "out who else can write to the store in which they meet."
    )
