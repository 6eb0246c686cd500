"""Blocks of device memory are lent, copied out and given back. The driver is a stand-in with host memory.

What a real one does is in tests/gpu.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from weft.errors import ConfigError, PeerError
from weft.rpc import device_arena
from weft.rpc.arena import Arena, Borrower, Place
from weft.rpc.device_arena import DeviceBorrower, DeviceSlabs
from weft.rpc.wire import WireError

CPU = torch.device("cpu")


class FakeBuffer:
    def __init__(self, num_bytes: int, driver: FakeDriver) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.handle = len(driver.buffers).to_bytes(64, "little")

    def tensor(self, on_dropped: Callable[[], object]) -> torch.Tensor:
        return self.memory


class FakeDriver:
    """What device_arena calls of weft.local.cuda_driver."""

    def __init__(self) -> None:
        self.buffers: list[FakeBuffer] = []
        self.opened: list[int] = []
        self.has_memory = True

    def new_buffer(self, num_bytes: int, device: torch.device) -> FakeBuffer:
        if not self.has_memory:
            raise ConfigError("no memory")
        buffer = FakeBuffer(num_bytes, self)
        self.buffers.append(buffer)
        return buffer

    def free_buffers(self, buffers: Sequence[FakeBuffer]) -> None: ...

    def open_device_memory(self, handle: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
        number = int.from_bytes(handle, "little")
        self.opened.append(number)
        memory = self.buffers[number].memory
        assert memory.numel() == num_bytes
        return memory


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(device_arena, "cuda_driver", fake)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    return fake


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the borrower believe that it is another process than the lender."""
    monkeypatch.setattr(device_arena, "os", SimpleNamespace(getpid=lambda: os.getpid() + 1))


def put(arena: Arena, value: int, num_bytes: int = 40_000) -> Place:
    place = arena.put(torch.full((num_bytes,), value, dtype=torch.uint8), 1)
    assert place is not None
    return place


@pytest.mark.usefixtures("elsewhere")
def test_a_block_is_copied_out_and_given_back(driver: FakeDriver) -> None:
    arena, borrower = Arena(DeviceSlabs(CPU).new_slab), DeviceBorrower(Borrower())
    first, second = put(arena, 1), put(arena, 2)
    assert arena.num_blocks_in_use == 2
    got = borrower.fetch(second, 0, CPU)
    assert arena.num_blocks_in_use == 1
    assert got.tolist() == [2] * 40_000
    assert borrower.fetch(first, 0, CPU).tolist() == [1] * 40_000
    put(arena, 3)
    assert got[0] == 2, "it is a copy"
    assert len(driver.buffers) == 1
    assert driver.opened == [0], "memory stays open"
    borrower.release_peer(0)
    borrower.fetch(put(arena, 4), 0, CPU)
    assert driver.opened == [0, 0]


@pytest.mark.usefixtures("elsewhere")
def test_beyond_the_bound_memory_is_opened_for_each_block(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arena, "KEPT_BYTES", 0)
    arena, borrower = Arena(DeviceSlabs(CPU).new_slab, kept_bytes=0), DeviceBorrower(Borrower())
    for value in (1, 2):
        assert borrower.fetch(put(arena, value), 0, CPU)[0] == value
    assert driver.opened == [0, 0]
    arena.trim()
    assert arena.num_bytes == 0, "and freed, since nobody has it open"


def test_kept_memory_is_not_freed_before_the_end(driver: FakeDriver) -> None:
    arena = Arena(DeviceSlabs(CPU).new_slab, kept_bytes=0)
    DeviceBorrower(Borrower()).fetch(put(arena, 1), 0, CPU)
    arena.trim()
    assert arena.num_bytes > 0
    arena.close()
    assert arena.num_bytes == 0


def test_within_a_process_nothing_is_opened(driver: FakeDriver) -> None:
    arena, borrower = Arena(DeviceSlabs(CPU).new_slab), DeviceBorrower(Borrower())
    assert borrower.fetch(put(arena, 5), 0, CPU)[0] == 5
    assert driver.opened == []
    place = put(arena, 6)
    borrower.fetch(put(arena, 7), 0, CPU)  # maps the page with the flags
    arena.close()
    with pytest.raises(PeerError, match="worker 3 has shut down"):
        borrower.fetch(place, 3, CPU)


def test_without_device_memory_there_is_no_block(driver: FakeDriver) -> None:
    driver.has_memory = False
    arena = Arena(DeviceSlabs(CPU).new_slab)
    assert arena.put(torch.zeros(40_000, dtype=torch.uint8), 1) is None


def test_a_block_outside_of_the_memory_is_refused_and_given_back(driver: FakeDriver) -> None:
    arena, borrower = Arena(DeviceSlabs(CPU).new_slab), DeviceBorrower(Borrower())
    place = put(arena, 1)
    with pytest.raises(WireError, match="outside of its memory"):
        borrower.fetch(place._replace(num_bytes=1 << 40), 0, CPU)
    assert arena.num_blocks_in_use == 0
