"""Shared memory of the local group: sealed, opened only where it is what its owner says, read inside only."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

import pytest
import torch

from weft.errors import ConfigError, PeerError, TamperedError
from weft.local import kernel, segment
from weft.local.board import INLINE_BYTES, Board, Place, PlaceKind
from weft.local.memory import CpuMemory, segment_place
from weft.local.roster import Member, Roster
from weft.local.segment import (
    MappedSegments,
    SegmentName,
    open_segment,
    open_segment_file,
    own_segment,
    part_of,
    read_segment_name,
)
from weft.trust import SEALS

PAGE = mmap.PAGESIZE


def resident_bytes(name: SegmentName) -> int:
    return os.stat(f"/proc/self/fd/{name.fd}").st_blocks * 512


def test_a_segment_can_not_change_its_length() -> None:
    own = own_segment(3 * PAGE)
    assert fcntl.fcntl(own.name.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    for num_bytes in (0, PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(own.name.fd, num_bytes)
    assert os.stat(f"/proc/self/fd/{own.name.fd}").st_mode & 0o777 == 0o600


def test_memory_goes_back_with_its_owner_while_a_peer_has_it_mapped() -> None:
    own = own_segment(64 * PAGE)
    own.tensor.fill_(1)
    peer = open_segment(own.name, 0)
    assert resident_bytes(own.name) == 64 * PAGE
    fd = os.dup(own.name.fd)
    try:
        name = own.name._replace(fd=fd)
        del own
        assert resident_bytes(name) == 0
        assert not peer.tensor.any()  # a mapping of what was given back reads as zeros: no SIGBUS
    finally:
        os.close(fd)


def test_a_peer_maps_the_same_memory() -> None:
    own = own_segment(PAGE)
    peer = MappedSegments().get(own.name, 0)
    peer.tensor[5] = 7
    assert own.tensor[5] == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "self"},
        {"pid": -1},
        {"pid": 0},
        {"pid": True},
        {"fd": "../../../tmp/evil"},
        {"fd": -1},
        {"fd": 1 << 31},
        {"inode": 0},
        {"inode": 1.0},
        {"num_bytes": 0},
        {"num_bytes": -PAGE},
        {"num_bytes": 2 * PAGE},
        {"num_bytes": 1 << 60},
        {"num_bytes": PAGE - 1},
    ],
)
def test_false_segment_names_are_refused(changes: dict[str, object]) -> None:
    own = own_segment(PAGE)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TamperedError, match=r"^rank 3 \(pid "):
        open_segment(own.name._replace(**changes), 3)  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_by_a_path_is_not_mapped(tmp_path: Path) -> None:
    """As a stranger led a rank to it: `self` for a process, and a path for a descriptor."""
    evil = tmp_path / "evil"
    evil.write_bytes(b"x" * PAGE)
    with open(evil, "r+b") as file:
        status = os.fstat(file.fileno())
        by_path = SegmentName("self", f"../../..{evil}", 1, PAGE, status.st_ino)  # type: ignore[arg-type]
        with pytest.raises(TamperedError, match="process id must be an integer"):
            open_segment(by_path, 0)
        with pytest.raises(PeerError, match="has freed memory"):
            open_segment(SegmentName(os.getpid(), file.fileno(), 1, PAGE, status.st_ino), 0)


def test_memory_that_is_gone_names_the_rank() -> None:
    own = own_segment(PAGE)
    name = own.name
    with pytest.raises(PeerError, match=r"rank 3 \(pid 4194303\) is gone") as caught:
        open_segment_file(name._replace(pid=4194303), 3)
    assert caught.value.ranks == (3,)
    with pytest.raises(PeerError, match="has freed memory that it had exposed"):
        open_segment_file(name._replace(inode=name.inode + 1), 3)
    del own
    with pytest.raises(PeerError, match=r"is gone|has freed memory"):
        open_segment_file(name, 3)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "12345",
        {},
        [],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, "5"],
        [1, 2, 3, True, 5],
        [1, -2, 3, 4, 5],
        [1, 2, 1 << 64, 4, 5],
        ["self", "../../../tmp/evil", 1, 4096, 5],
        [[1], 2, 3, 4, 5],
    ],
)
def test_only_five_integers_are_a_name(said: object) -> None:
    with pytest.raises(TamperedError, match="the page"):
        read_segment_name(said, "the page")
    assert read_segment_name([1, 2, 3, 4, 5], "it") == SegmentName(1, 2, 3, 4, 5)


def test_a_range_inside_of_a_segment() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    assert part_of(memory, 10, 20, 0).tolist() == list(range(10, 30))
    assert part_of(memory, 100, 0, 0).numel() == 0
    for start, num_bytes in ((-1, 10), (-10, 10), (0, 101), (91, 10), (101, 0), (50, -10), (1 << 62, 1)):
        with pytest.raises(TamperedError, match="rank 7 placed a tensor at bytes"):
            part_of(memory, start, num_bytes, 7)


def test_places_outside_of_what_a_peer_exposed_are_errors() -> None:
    page, exposed = own_segment(Board.num_bytes(2)), own_segment(PAGE)
    roster = Roster(0, [Member(0, os.getpid()), Member(4, os.getpid(), is_reachable=True)])
    memory = CpuMemory(Board(page, 0, 2), roster, MappedSegments(), is_direct=True)
    good = segment_place(exposed.name, 16)
    assert memory.window(1, good, torch.float32, 4, 0).read(0, 4).numel() == 4
    for place, numel in (
        (good._replace(start=-16), 4),
        (good._replace(start=PAGE), 4),
        (good, PAGE),
        (good, 1 << 61),
        (good._replace(start=(1 << 63) - 1), 4),
        (good._replace(segment_id=77, num_bytes=2 * PAGE), 4),
        (good._replace(segment_id=78, fd=-1), 4),
        (good._replace(segment_id=79, inode=-1), 4),
        (Place(PlaceKind.INLINE), INLINE_BYTES // 4 + 1),
        (Place(PlaceKind.NOWHERE), 4),
        (Place(99), 4),
    ):
        with pytest.raises(TamperedError, match="rank 4"):
            memory.window(1, place, torch.float32, numel, 0)


def test_a_damaged_reason_names_nobody() -> None:
    page = own_segment(Board.num_bytes(2))
    board = Board(page, 0, 2)
    for text in (b"9 1 -1 x \xff:words", b"\xff" * 300, b"1" * 300, b""):
        struct.pack_into("<iiI384s", page.memory, 64, 3, 0, 384, text)
        assert set(board.reason(0).blamed) <= {0, 1}


def test_a_system_that_can_not_seal_memory_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(segment, "seal_memory", refuse)
    monkeypatch.setattr(kernel, "seal_memory", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="this system or container can't seal it"):
        own_segment(1)
    with pytest.raises(ConfigError, match=r"memory that can be sealed.*Use backend 'gloo' here"):
        kernel.check_supported()
    assert len(os.listdir("/proc/self/fd")) == before
