"""Device maps are checked as torch checks them, with its words."""

from __future__ import annotations

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

from weft.errors import ConfigError
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
