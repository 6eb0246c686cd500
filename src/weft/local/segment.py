"""Shared memory that leaves nothing behind.

A segment is a memfd: memory with a file descriptor and no name. Peers open it
through /proc/<pid>/fd/<fd>, so it needs no room in /dev/shm (which containers
keep small), and the kernel frees it when its last holder ends, kill -9 included.

It is sealed: its length can't change under a mapping. A peer's segment is mapped only after it
was checked to be such a memfd of this same user (weft.trust).

`own_segment` makes one; `MappedSegments` opens and remembers the peers'.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

import torch

from weft.errors import ConfigError, PeerError, StateError, TamperedError
from weft.trust import MEMORY_NAME, check_integer, open_peer_memory, seal_memory

_segment_ids = itertools.count(1)
_KEPT_MAPPINGS = 256
_FALLOC_KEEP_SIZE_AND_PUNCH_HOLE = 0x3


class SegmentName(NamedTuple):
    """What a peer needs to find a segment: valid as long as its owner lives and keeps it."""

    pid: int
    fd: int
    segment_id: int  # never reused in a process
    num_bytes: int
    inode: int  # what the descriptor must lead to, should its number have been reused


class Segment:
    """A mapped piece of shared memory. `tensor` covers it, as bytes."""

    def __init__(self, name: SegmentName, memory: mmap.mmap) -> None:
        self.name = name
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with torch.inference_mode(False):  # it must be writable in that mode and outside of it
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)  # 1D


def own_segment(num_bytes: int, *, is_reclaimed: bool = True, kind: str = MEMORY_NAME) -> Segment:
    """Make a segment of at least `num_bytes`. Peers can open it as memory of this `kind` only.

    Its memory goes back to the system when the last tensor on it is gone here,
    even while a peer still has it mapped (not so with is_reclaimed=False: then it
    lives until the last mapping is gone). Raises ConfigError when the machine has
    not that much memory: nothing is changed then.
    """
    num_bytes = whole_pages(num_bytes)
    check_free_memory(num_bytes)
    try:
        fd = os.memfd_create(kind, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            problem = "no file descriptor is free"
            advice = "Raise the limit (ulimit -n), or allocate fewer, larger buffers."
        else:
            problem = "this system or container forbids memfd_create"
            advice = "Allow it, or use backend 'gloo'; weft.rpc can't do without."
        raise ConfigError(f"weft shared memory: {problem} ({error.strerror}). {advice}") from error
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        seal_memory(fd)
        memory = mmap.mmap(fd, num_bytes)
    except PermissionError as error:
        os.close(fd)
        raise ConfigError(
            f"weft shared memory: this system or container can't seal it ({error.strerror}). Allow it, or "
            "use backend 'gloo'; weft.rpc can't do without."
        ) from error
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise ConfigError(f"weft shared memory: {num_bytes} bytes can't be mapped ({error}).") from error
    owner = os.getpid()
    weakref.finalize(memory, _free, owner, fd, num_bytes if is_reclaimed else 0).atexit = False
    return Segment(SegmentName(owner, fd, next(_segment_ids), num_bytes, os.fstat(fd).st_ino), memory)


def whole_pages(num_bytes: int) -> int:
    """Round a number of bytes up to the length of a segment: whole pages, at least one."""
    return max(mmap.PAGESIZE, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _free(owner: int, fd: int, num_bytes: int) -> None:
    if os.getpid() != owner:  # a forked child dropped its copy: the memory is still its parent's
        return
    # Peers may keep a mapping they have not used for long; punching the whole file
    # out returns the pages all the same.
    if num_bytes:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate(fd, _FALLOC_KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(num_bytes))
    os.close(fd)


class MappedSegments:
    """Peers' segments, mapped when first used and kept while they are used.

    The least recently used mapping is dropped beyond a bound.
    """

    def __init__(self) -> None:
        self._segments: OrderedDict[tuple[int, int], Segment] = OrderedDict()
        self._mutex = threading.Lock()  # collectives and messages run on different threads

    def get(self, name: SegmentName, rank: int) -> Segment:
        """The peer's segment, mapped here. `rank` is for the error when its owner is gone."""
        key = (name.pid, name.segment_id)
        with self._mutex:
            segment = self._segments.get(key)
            if segment is None:
                segment = self._segments[key] = open_segment(name, rank)
                if len(self._segments) > _KEPT_MAPPINGS:
                    self._segments.popitem(last=False)
            self._segments.move_to_end(key)
        return segment

    def drop(self, pid: int, segment_ids: Collection[int] | None) -> None:
        """Unmap these segments of a process; all of them for None."""
        with self._mutex:
            for key in list(self._segments):
                if key[0] == pid and (segment_ids is None or key[1] in segment_ids):
                    del self._segments[key]


def read_segment_name(value: object, what: str) -> SegmentName:
    """Decode a segment's name from a peer's JSON; raises TamperedError for anything else."""
    if type(value) is not list or len(value) != len(SegmentName._fields):
        raise TamperedError(f"{what} is not the name of a segment. Nothing was opened.")
    # open_segment_file checks the bounds.
    return SegmentName(*(check_integer(number, what, 0, (1 << 64) - 1) for number in value))


def open_segment(name: SegmentName, rank: int, kind: str = MEMORY_NAME) -> Segment:
    """Map a segment that another process of this user owns. `rank` is for errors.

    Raises PeerError when its owner is gone or has freed it, or it is of another kind, and TamperedError for a
    false name.
    """
    fd = open_segment_file(name, rank, kind)
    try:
        memory = mmap.mmap(fd, name.num_bytes)
    finally:
        os.close(fd)
    return Segment(name, memory)


def open_segment_file(name: SegmentName, rank: int, kind: str = MEMORY_NAME) -> int:
    """A descriptor of a peer's segment; the caller closes it. Raises as open_segment does."""
    owner = f"rank {rank} (pid {name.pid})"
    try:
        return open_peer_memory(name.pid, name.fd, name.inode, name.num_bytes, kind)
    except TamperedError as error:
        raise TamperedError(f"{owner}: {error}") from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerError(f"{owner} is gone, and its shared memory with it.", [rank]) from error
    except PermissionError as error:
        raise StateError(
            f"the shared memory of {owner} may not be opened. Ranks of one group must "
            "run as one user; a program that made itself undumpable can't share memory this way."
        ) from error
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        raise PeerError(f"{owner} has freed memory that it had exposed.", [rank]) from error


def part_of(memory: torch.Tensor, start: int, num_bytes: int, rank: int) -> torch.Tensor:
    """Return a range of memory that a rank exposed; raises TamperedError where it lies outside."""
    end = start + num_bytes
    if not 0 <= start <= end <= memory.numel():
        raise TamperedError(
            f"rank {rank} placed a tensor at bytes {start} to {end} of shared memory that has "
            f"{memory.numel()}. Nothing was read or written there. The ranks run different code, or a "
            "program of this user wrote into the group's shared memory."
        )
    return memory[start:end]


def check_free_memory(num_bytes: int) -> None:
    """Raise ConfigError if the machine (or this container) can't hold `num_bytes` more."""
    free_bytes = free_memory_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"weft shared memory: {num_bytes:,} bytes asked for, {free_bytes:,} are free on this machine. "
            "Use fewer ranks or smaller buffers."
        )


def free_memory_bytes() -> int:
    """What is free by /proc/meminfo, and by the container's limit where there is one."""
    with open("/proc/meminfo", "rb") as meminfo:
        fields = dict(line.split(b":", 1) for line in meminfo)
    free_bytes = int(fields[b"MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", "rb") as limit_file:
            limit = limit_file.read().strip()
        with open("/sys/fs/cgroup/memory.current", "rb") as used_file:
            used = int(used_file.read())
        with open("/sys/fs/cgroup/memory.stat", "rb") as stat_file:
            stat = dict(line.split() for line in stat_file)
    except OSError:
        return free_bytes
    if limit == b"max":
        return free_bytes
    # Pages of files are counted as used, but make room when they must.
    reclaimable = int(stat.get(b"active_file", 0)) + int(stat.get(b"inactive_file", 0))
    return max(0, min(free_bytes, int(limit) - used + reclaimable))
