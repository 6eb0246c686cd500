"""A peer's memory is opened by numbers, and only when it is what it should be."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.errors import TamperedError
from weft.trust import SEALS, check_process, open_peer_memory, seal_memory


@contextmanager
def memory(
    name: str = "weft", num_bytes: int = 4096, seals: int | None = SEALS
) -> Iterator[tuple[int, int, int, int]]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        if seals is not None:
            seal_memory(fd, seals)
        yield os.getpid(), fd, os.fstat(fd).st_ino, num_bytes
    finally:
        os.close(fd)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sealed_memory_opens_and_keeps_its_length() -> None:
    with memory() as place:
        opened = open_peer_memory(*place)
        try:
            os.pwrite(opened, b"hello", 0)
            assert os.pread(place[1], 5, 0) == b"hello"
            for num_bytes in (0, 8192):
                with pytest.raises(PermissionError):
                    os.ftruncate(place[1], num_bytes)
            assert fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
        finally:
            os.close(opened)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, "self"),
        (0, 0),
        (0, -1),
        (0, 1 << 40),
        (0, True),
        (0, None),
        (1, "../../../tmp/evil"),
        (1, -1),
        (1, 3.0),
        (1, 1 << 40),
        (2, "1"),
        (2, 0),
        (2, 1 << 70),
        (3, 0),
        (3, -4096),
        (3, 1 << 60),
        (3, "4096"),
        (3, [4096]),
    ],
)
def test_numbers_are_numbers(at: int, value: object) -> None:
    with memory() as place:
        false = list[object](place)
        false[at] = value
        before = count_descriptors()
        with pytest.raises(TamperedError):
            open_peer_memory(*false)  # type: ignore[arg-type]
        assert count_descriptors() == before


@pytest.mark.parametrize("seals", [None, 0x2, 0x2 | 0x4, 0x1 | 0x4])
def test_memory_that_can_change_its_length_is_refused(seals: int | None) -> None:
    with memory(seals=seals) as place, pytest.raises(TamperedError, match="lacks the seals"):
        open_peer_memory(*place)


@pytest.mark.parametrize("name", ["evil", "weft2", "weft-secret", "", "weft (deleted) x"])
def test_memory_of_another_name_is_refused(name: str) -> None:
    with memory(name) as place, pytest.raises(OSError, match="not shared memory of weft") as caught:
        open_peer_memory(*place)
    assert caught.value.errno == errno.ESTALE


def test_another_length_or_inode_is_refused() -> None:
    before = count_descriptors()
    with memory() as (pid, fd, inode, num_bytes):
        with pytest.raises(TamperedError, match="has 4096 bytes, not 8192"):
            open_peer_memory(pid, fd, inode, 2 * num_bytes)
        with pytest.raises(OSError, match="has been replaced"):
            open_peer_memory(pid, fd, inode + 1, num_bytes)
    assert count_descriptors() == before


def test_files_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "memfd:weft"
    path.write_bytes(b"x" * 4096)
    read_end, write_end = os.pipe()
    opened = [read_end, write_end, os.open(path, os.O_RDWR), os.open(os.devnull, os.O_RDWR)]
    try:
        for fd in opened:
            with pytest.raises(OSError, match="not shared memory of weft"):
                open_peer_memory(os.getpid(), fd, os.fstat(fd).st_ino, 4096)
    finally:
        for fd in opened:
            os.close(fd)


def test_what_is_gone_is_said_to_be_gone() -> None:
    with memory() as place:
        pass
    with pytest.raises(OSError, match=r"No such file|not shared memory of weft"):
        open_peer_memory(*place)
    with pytest.raises(FileNotFoundError):
        open_peer_memory(4194303, *place[1:])


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_memory_of_another_user_is_refused() -> None:
    """Its process is refused; and so is its file, in the hands of a process of this user."""
    with memory() as place:
        os.fchown(place[1], 65534, 65534)
        with pytest.raises(TamperedError, match="file of user 65534"):
            open_peer_memory(*place)
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with stranger:
        assert stranger.stdout is not None
        place = [int(number) for number in stranger.stdout.readline().split()]
        with pytest.raises((TamperedError, PermissionError), match=r"of user 65534|undumpable"):
            open_peer_memory(place[0], place[1], place[2], 4096)
        with pytest.raises((TamperedError, PermissionError), match=r"^a rank (is of user 65534|belongs to)"):
            check_process(place[0], "a rank")


# Makes what a rank would make, as another user, and holds it until its input ends.
_STRANGER = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
fd = os.memfd_create("weft", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
print(os.getpid(), fd, os.fstat(fd).st_ino, flush=True)
sys.stdin.read()
"""
