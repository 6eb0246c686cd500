"""Calls to Linux: futex, sched_yield, a move to another core, cross-memory copies.

A futex lets a rank sleep until a word in shared memory changes, so that waiting
burns no core. The cross-memory calls copy between two processes in one pass,
without a shared buffer; a kernel or a container may forbid them, and
`can_reach` asks before anyone relies on them.

The GIL is released during each of these calls, but for `futex_wake_one` and `leave_core`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError, PeerError, StateError
from weft.trust import MEMORY_NAME, seal_memory

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 2**31 - 1
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}

MOST_SPANS = 1024  # in one call, says the kernel
_FEW_SPANS = 32
Spans = npt.NDArray[np.uint64]  # a row each: address, number of bytes; as the kernel's iovec

# x86 keeps one core's stores in order for every other core; elsewhere a fence is
# needed between the data and the word that announces it.
NEEDS_FENCES = platform.machine() not in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("secs", ctypes.c_long), ("nanosecs", ctypes.c_long))


class _Span(ctypes.Structure):
    """A span of memory, as the kernel's iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def is_supported() -> bool:
    """Whether this system has what process ranks of the local group need."""
    return sys.platform == "linux" and platform.machine() in _FUTEX_NUMBER


def find_obstacle() -> str | None:
    """Why process ranks of the local group can't run here; None where they can."""
    if not is_supported():
        return f"it needs Linux (futex and memfd), and this is {sys.platform} on {platform.machine()}"
    if not os.path.exists("/proc/self/fd"):
        return "it needs /proc, which is not mounted here"
    try:
        fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # not forbidden, only used up
            return f"it needs memfd_create, which this system or container forbids ({error.strerror})"
        return None
    try:
        seal_memory(fd)
    except OSError as error:
        return f"it needs memory that can be sealed, which this system does not have ({error.strerror})"
    finally:
        os.close(fd)
    return None


def host_identity() -> str:
    """This machine since its last boot, and the process namespace in it: equal for ranks that share them.

    Where there is no /proc to say it, the machine's name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def check_supported() -> None:
    """Raise ConfigError where the local group can't run."""
    obstacle = find_obstacle()
    if obstacle is not None:
        raise ConfigError(f"backend 'weft': {obstacle}. Use backend 'gloo' here.")


def _load_libc() -> Any:
    """The C library with the calls below; elsewhere than on Linux nothing, so that importing works."""
    if not is_supported():
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_writev.restype = ctypes.c_ssize_t
    return libc


_libc = _load_libc()
_libc_locked: Any = None if _libc is None else ctypes.PyDLL(None)
_NUMBER = ctypes.c_long(_FUTEX_NUMBER.get(platform.machine(), -1))
_WAIT = ctypes.c_int(_FUTEX_WAIT)
_WAKE = ctypes.c_int(_FUTEX_WAKE)
_ALL = ctypes.c_int(_EVERYONE)
_ONE = ctypes.c_int(1)
_ZERO = ctypes.c_int(0)
_DUMMY = ctypes.c_uint(0)
_DUMMY_WORD = ctypes.c_void_p(ctypes.addressof(_DUMMY))


def yield_core() -> None:
    """Let another thread have this core for a moment."""
    _libc.sched_yield()


def leave_core() -> None:
    """Move this thread to another core, where it may have one. It may come back at any time.

    It says afterwards which cores it may use: those it could use before, even if the process gets more.
    """
    cores = os.sched_getaffinity(0)
    others = cores - {_libc.sched_getcpu()}
    if others:
        with suppress(OSError):  # what confines this process has changed, or does not let it choose
            try:
                os.sched_setaffinity(0, others)
            finally:
                os.sched_setaffinity(0, cores)


def fence() -> None:
    """Keep later stores behind earlier ones, for every core. Nothing to do on x86."""
    if NEEDS_FENCES:
        futex_wake(_DUMMY_WORD)  # the kernel runs a full fence in it


def futex_wake(word: ctypes.c_void_p) -> None:
    """Wake every waiter on the word. The kernel runs a full memory fence in it."""
    _libc.syscall(_NUMBER, word, _WAKE, _ALL, None, None, _ZERO)


def futex_wake_one(word: ctypes.c_void_p) -> None:
    """Wake one waiter on the word.

    Python's lock is kept meanwhile: to give it away and get it back may cost more than the call.
    """
    _libc_locked.syscall(_NUMBER, word, _WAKE, _ONE, None, None, _ZERO)


def futex_wait(word: ctypes.c_void_p, seen: int, secs: float) -> None:
    """Sleep until the word differs from `seen`, someone wakes it, or `secs` have passed."""
    nanosecs = int(secs * 1e9)
    limit = _Timespec(nanosecs // 1_000_000_000, nanosecs % 1_000_000_000)
    _libc.syscall(_NUMBER, word, _WAIT, ctypes.c_uint(seen & 0xFFFFFFFF), ctypes.byref(limit), None, _ZERO)


class RemoteMemory:
    """Another process's memory, read and written where it lies.

    One object serves one thread at a time: its two spans are reused between calls.
    """

    def __init__(self, pid: int, rank: int) -> None:
        self._pid = ctypes.c_int(pid)
        self._rank = rank
        self._here = _Span(0, 0)
        self._there = _Span(0, 0)
        self._spans = (
            ctypes.byref(self._here),
            ctypes.c_ulong(1),
            ctypes.byref(self._there),
            ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )

    def read(self, here: int, there: int, num_bytes: int) -> None:
        """Copy from the peer's address `there` to our address `here`."""
        self._move(_libc.process_vm_readv, here, there, num_bytes)

    def write(self, here: int, there: int, num_bytes: int) -> None:
        """Copy from our address `here` to the peer's address `there`."""
        self._move(_libc.process_vm_writev, here, there, num_bytes)

    def _move(self, call: Any, here: int, there: int, num_bytes: int) -> None:
        while num_bytes:
            self._here.address, self._here.num_bytes = here, num_bytes
            self._there.address, self._there.num_bytes = there, num_bytes
            moved = call(self._pid, *self._spans)
            if moved <= 0:
                code = ctypes.get_errno()
                if code in (errno.EPERM, errno.ENOSYS):  # allowed when the group was made
                    raise StateError(
                        f"the memory of rank {self._rank} (pid {self._pid.value}) may not be reached any "
                        f"more: {os.strerror(code)}. A rank has restricted itself (seccomp, prctl, another "
                        "user) after the group was made. Do so before, or set WEFT_DIRECT_COPY=0."
                    )
                raise PeerError(
                    f"the memory of rank {self._rank} (pid {self._pid.value}) can't be reached: "
                    f"{os.strerror(code)} ({errno.errorcode.get(code, code)}). The rank has ended, or it "
                    "freed a tensor before its collective was done.",
                    [self._rank],
                )
            # The kernel moves at most 2 GiB a call and may stop short at a page.
            here, there, num_bytes = here + moved, there + moved, num_bytes - moved

    def read_into_spans(self, here: Spans, there: int) -> None:
        """Copy from the peer's address `there` on, one span of ours after another."""
        for start in range(0, len(here), MOST_SPANS):
            part = here[start : start + MOST_SPANS]
            num_bytes = int(part[:, 1].sum())
            self.read_spans(part, np.array([[there, num_bytes]], dtype=np.uint64))
            there += num_bytes

    def read_spans(self, here: Spans, there: Spans) -> None:
        """Copy the peer's spans, one after another, to ours, one after another.

        They hold equally many bytes, but may be cut otherwise; at most MOST_SPANS of each.
        """
        moved = _libc.process_vm_readv(
            self._pid,
            ctypes.c_void_p(here.ctypes.data),
            ctypes.c_ulong(len(here)),
            ctypes.c_void_p(there.ctypes.data),
            ctypes.c_ulong(len(there)),
            ctypes.c_ulong(0),
        )
        if moved != int(here[:, 1].sum()):  # stopped short, or refused: then this finds out why
            self._read_one_by_one(here, there, max(moved, 0))

    def _read_one_by_one(self, here: Spans, there: Spans, skipped: int) -> None:
        """The same from byte `skipped` on."""
        sources = iter(there.tolist())
        source = left = 0
        for target, num_bytes in here.tolist():
            while num_bytes:
                if not left:
                    source, left = next(sources)
                    continue
                step = min(num_bytes, left)
                done = min(skipped, step)
                if done < step:
                    self.read(target + done, source + done, step - done)
                skipped -= done
                target, num_bytes = target + step, num_bytes - step
                source, left = source + step, left - step


class OwnMemory(RemoteMemory):
    """This process's memory in the place of another's: of sister threads, or mapped from a peer.

    Any number of threads may use it at a time.
    """

    def __init__(self) -> None:
        super().__init__(os.getpid(), -1)

    def read(self, here: int, there: int, num_bytes: int) -> None:
        """Copy within this process."""
        ctypes.memmove(here, there, num_bytes)

    def read_spans(self, here: Spans, there: Spans) -> None:
        """Copy within this process, spans to spans."""
        # Many copies cost more than one call of the kernel. Where it refuses, they stand in for it.
        if len(here) <= _FEW_SPANS:
            self._read_one_by_one(here, there, 0)
        else:
            self._pid = ctypes.c_int(os.getpid())  # a forked child means its own memory, not its parent's
            super().read_spans(here, there)


OWN_MEMORY = OwnMemory()


def can_reach(pid: int, address: int, expected: bytes) -> bool:
    """Whether cross-memory copies from and to `pid` work: read `expected` at its `address`, write it back.

    Both are asked for, since a filter of system calls may forbid one alone. Any number of ranks may do this
    to one address at a time: none changes a byte.
    """
    found = ctypes.create_string_buffer(len(expected))
    here = _Span(ctypes.addressof(found), len(expected))
    there = _Span(address, len(expected))
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    spans = (ctypes.c_int(pid), ctypes.byref(here), one, ctypes.byref(there), one, none)
    if _libc.process_vm_readv(*spans) != len(expected) or found.raw != expected:
        return False
    return _libc.process_vm_writev(*spans) == len(expected)
