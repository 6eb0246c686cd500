"""Device maps are checked as torch checks them, with its words; blocks of device memory are lent.

The driver of the device is a stand-in with host memory; what a real one does is in test_on_gpu.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.rpc import TensorPipeRpcBackendOptions
from torch.distributed.rpc.backend_registry import (
    _create_device_list,
    _create_reverse_mapping,
    _validate_device_maps,
)

from weft.errors import ConfigError, PeerError
from weft.rpc import device_arena
from weft.rpc.arena import Arena, Borrower, Place
from weft.rpc.device_arena import DeviceBorrower, DeviceSlabs
from weft.rpc.devices import (
    DeviceMap,
    WorkerDevices,
    as_device_list,
    as_device_map,
    check_device_maps,
    invert_device_map,
    merge_device_maps,
    plan_devices,
)
from weft.rpc.wire import WireError

NAMES = ["worker0", "worker1", "worker2"]
devices = st.sampled_from([torch.device("cpu"), *(torch.device("cuda", index) for index in range(4))])
gpus = st.sampled_from([torch.device("cuda", index) for index in range(4)])
workers = st.builds(
    WorkerDevices,
    st.integers(0, 4),
    st.lists(gpus, max_size=3),
    st.dictionaries(
        st.sampled_from([*NAMES, "stranger"]), st.dictionaries(devices, devices, max_size=3), max_size=2
    ),
)
groups = st.lists(workers, min_size=2, max_size=3).map(lambda drawn: dict(zip(NAMES, drawn, strict=False)))


@settings(max_examples=500)
@given(groups, st.booleans())
def test_maps_are_judged_as_torch_judges_them(group: dict[str, WorkerDevices], is_static: bool) -> None:
    expected = None
    try:
        _validate_device_maps(
            list(group),
            {name: worker.num_devices for name, worker in group.items()},
            {name: worker.device_maps for name, worker in group.items()},
            {name: worker.devices for name, worker in group.items()},
            is_static,
        )
    except ValueError as error:
        expected = str(error)
    if expected is None:
        check_device_maps(group, is_static=is_static)
    else:
        with pytest.raises(ConfigError) as caught:
            check_device_maps(group, is_static=is_static)
        assert str(caught.value) == expected


@given(groups)
def test_the_devices_that_take_part_are_torchs(group: dict[str, WorkerDevices]) -> None:
    maps = {name: worker.device_maps for name, worker in group.items()}
    for name, worker in group.items():
        back = _create_reverse_mapping(name, list(group), maps)
        gpus_of_maps = [device for map_ in (*worker.device_maps.values(), *back.values()) for device in map_]
        if worker.devices or any(device.type == "cuda" for device in gpus_of_maps):
            assert plan_devices(name, group) == _create_device_list(worker.devices, worker.device_maps, back)
        else:
            assert plan_devices(name, group) == []


@given(st.dictionaries(devices, devices, max_size=4))
def test_answers_go_by_the_inverse(drawn: DeviceMap) -> None:
    try:
        device_map = as_device_map(drawn)
    except ConfigError:
        assert len(set(drawn.values())) < len(drawn)
        return
    inverse = invert_device_map(device_map)
    assert all(inverse[target] == source for source, target in device_map.items())
    assert invert_device_map(inverse) == device_map


def test_numbers_and_texts_are_devices() -> None:
    assert as_device_map({0: "cuda:1", "cpu": torch.device("cuda", 2)}) == {
        torch.device("cuda", 0): torch.device("cuda", 1),
        torch.device("cpu"): torch.device("cuda", 2),
    }
    assert as_device_list([0, "cuda:1"]) == [torch.device("cuda", 0), torch.device("cuda", 1)]


def torch_error(make: object) -> str:
    assert callable(make)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    return str(caught.value)


def test_the_messages_are_torchs() -> None:
    one, two = {"cuda:0": "cuda:1"}, {"cuda:0": "cuda:2"}
    not_one_to_one = {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}

    def merge_theirs() -> None:
        TensorPipeRpcBackendOptions(device_maps={"a": one}).set_device_map("a", two)

    pairs = [
        (
            lambda: TensorPipeRpcBackendOptions(device_maps={"a": not_one_to_one}),
            lambda: as_device_map(not_one_to_one),
        ),
        (lambda: TensorPipeRpcBackendOptions(devices=["cpu"]), lambda: as_device_list(["cpu"])),
        (merge_theirs, lambda: merge_device_maps(as_device_map(one), as_device_map(two))),
    ]
    for theirs, ours in pairs:
        assert torch_error(ours) == torch_error(theirs)


def test_maps_add_up() -> None:
    known = as_device_map({0: 1})
    assert merge_device_maps(known, as_device_map({1: 0, 0: 1})) == as_device_map({0: 1, 1: 0})
    assert known == as_device_map({0: 1})


def test_a_device_without_a_number_is_refused() -> None:
    group = {"a": WorkerDevices(2, (), {"a": {torch.device("cuda"): torch.device("cuda", 0)}})}
    with pytest.raises(ConfigError, match="source devices with invalid indices"):
        check_device_maps(group)


# -- blocks of device memory are lent, copied out and given back -------------------------------------


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
