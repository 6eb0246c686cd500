"""Device maps: which device of the receiver takes the place of which of the sender's. Pure.

A map of a caller holds for its calls to one callee. The answers to them go by its inverse, so every map is
one to one. The messages are torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.errors import ConfigError

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]  # the sender's device -> the receiver's


def as_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    """A user's map with devices in place of numbers and texts. Raises ConfigError unless it is one to one."""
    resolved: DeviceMap = {}
    taken: DeviceMap = {}
    for here, there in device_map.items():
        source, target = _as_device(here), _as_device(there)
        if target in taken:
            raise ConfigError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {source} and {taken[target]} to {target}"
            )
        resolved[source], taken[target] = target, source
    return resolved


def merge_device_maps(known: DeviceMap, added: DeviceMap) -> DeviceMap:
    """Both maps in one, as `set_device_map` adds to what was set before.

    Raises ConfigError when a device would be mapped twice.
    """
    for source, target in added.items():
        if known.get(source, target) != target:
            raise ConfigError(
                "`set_device_map` only supports 1-to-1 mapping, trying"
                f" to map {source} to {target} and {known[source]}"
            )
    return {**known, **added}


def as_device_list(devices: Iterable[DeviceType]) -> list[torch.device]:
    """A user's list of CUDA devices. Raises ConfigError for one of another kind."""
    resolved = [_as_device(device) for device in devices]
    for device in resolved:
        if device.type != "cuda":
            raise ConfigError(
                f"`set_devices` expect a list of CUDA devices, but got device type {device.type}."
            )
    return resolved


def _as_device(device: DeviceType) -> torch.device:
    # A number is a GPU's, also where torch sees none: a worker may have to say which of a peer's it means.
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def invert_device_map(device_map: DeviceMap) -> DeviceMap:
    """The map for the way back."""
    return {target: source for source, target in device_map.items()}


@dataclass(frozen=True)
class WorkerDevices:
    """What a worker says of its devices: how many it has, which take part, and its map for each callee."""

    num_devices: int
    devices: Sequence[torch.device] = ()  # empty: those of its maps
    device_maps: Mapping[str, DeviceMap] = field(default_factory=dict[str, DeviceMap])


def check_device_maps(workers: Mapping[str, WorkerDevices], *, is_static: bool = True) -> None:
    """Raise ConfigError where the workers' maps and devices don't fit together.

    In a group that is not static a map may name a worker that has not joined yet.
    """
    for name, worker in workers.items():
        if len(set(worker.devices)) != len(worker.devices):
            raise ConfigError(f"Node {name} has duplicated devices\ndevices = {list(worker.devices)}")
        if not _are_present(worker.devices, worker.num_devices):
            raise ConfigError(
                f"Node {name} has devices with invalid indices\n"
                f"devices = {list(worker.devices)}\n"
                f"device count = {worker.num_devices}"
            )
    for name, worker in workers.items():
        if is_static and not workers.keys() >= worker.device_maps.keys():
            raise ConfigError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {worker.device_maps.keys()}\n"
                f"node names = {list(workers)}"
            )
        for target_name, device_map in worker.device_maps.items():
            if len(set(device_map.values())) != len(device_map):
                raise ConfigError(
                    f"Node {name} has duplicated target devices in its device map for {target_name}\n"
                    f"device map = {device_map}"
                )
            _check_side("source", name, target_name, device_map, device_map.keys(), worker)
            if target_name in workers:
                target = workers[target_name]
                _check_side("target", name, target_name, device_map, device_map.values(), target)


def _check_side(
    side: str,
    name: str,
    target_name: str,
    device_map: DeviceMap,
    used: Iterable[torch.device],
    worker: WorkerDevices,
) -> None:
    """Check one side of a map, `used`, against the devices of the worker on that side."""
    if worker.devices:
        if not set(used) <= set(worker.devices):
            raise ConfigError(
                f"Node {name} has unexpected {side} devices in its device map for {target_name}\n"
                f"device map = {device_map}\n"
                f"devices = {list(worker.devices)}"
            )
    elif not _are_present(used, worker.num_devices):
        raise ConfigError(
            f"Node {name} has {side} devices with invalid indices in its device map for {target_name}\n"
            f"device map = {device_map}\n"
            f"device count = {worker.num_devices}"
        )


def _are_present(devices: Iterable[torch.device], num_devices: int) -> bool:
    # "cuda" without a number is another device in every thread, so no map can hold it: its index is None.
    known = range(num_devices)
    return all(
        device.type == "cpu" or (device.type == "cuda" and device.index in known) for device in devices
    )


def plan_devices(name: str, workers: Mapping[str, WorkerDevices]) -> list[torch.device]:
    """The devices of a worker that take part: those it names, else those of its own and the others' maps."""
    named = workers[name].devices
    if not named:
        own = [device for map_ in workers[name].device_maps.values() for device in map_]
        theirs = [
            device for worker in workers.values() for device in worker.device_maps.get(name, {}).values()
        ]
        named = {device for device in (*own, *theirs) if device.type != "cpu"}
    return sorted(named, key=lambda device: device.index)
