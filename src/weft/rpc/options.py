"""What can be set for a worker: torch's options, and what weft adds to them.

Added: `secret`, `listen`, `allow` and `max_in_flight`. Environment variables fill in what is not given:
WEFT_RPC_SECRET and WEFT_RPC_LISTEN.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import ConfigError, ConfigTypeError
from weft.rpc import constants
from weft.rpc.devices import DeviceMap, as_device_list, as_device_map, merge_device_maps

DeviceType = int | str | torch.device
_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


class RpcBackendOptions:
    """Options of any backend: the default timeout in seconds, and how workers find each other."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self.rpc_timeout = check_timeout(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of weft's backend, under the name that torch's users know.

    `num_worker_threads`: how many calls run at once on this worker; those that wait for a call of their
    own don't count. `device_maps`: for each callee, which device of its takes the place of which of ours.
    `devices`: this worker's devices that take part; those of its maps by default.

    `secret`: what every worker must know to be let in. `listen`: the address other hosts reach this one by;
    the loopback by default, so that only workers of this host can connect. `allow`: what peers may name in
    a call, as prefixes of qualified names; everything by default. `max_in_flight`: how many calls to one
    worker may be unanswered before the next one waits.

    `_transports` and `_channels` name parts of TensorPipe, and have no meaning here.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        secret: str | bytes | None = None,
        listen: str | None = None,
        allow: Sequence[str] | None = None,
        max_in_flight: int = constants.DEFAULT_MAX_IN_FLIGHT,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        for name, value in (("num_worker_threads", num_worker_threads), ("max_in_flight", max_in_flight)):
            if value < 1:
                raise ConfigError(f"RPC options: {name} must be at least 1, not {value}.")
        self.num_worker_threads = num_worker_threads
        self.max_in_flight = max_in_flight
        self.device_maps: dict[str, DeviceMap] = {
            name: as_device_map(device_map) for name, device_map in (device_maps or {}).items()
        }
        self.devices = as_device_list(devices or [])
        self.secret = secret
        self.listen = listen
        self.allow = None if allow is None else list(allow)

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add to the device map for the callee `to`. Each device stands for one other device."""
        self.device_maps[to] = merge_device_maps(self.device_maps.get(to, {}), as_device_map(device_map))

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Say which devices of this worker take part."""
        self.devices = as_device_list(devices)


@dataclass(frozen=True)
class AgentOptions:
    """The options of one agent, all of them known."""

    timeout_secs: float
    num_threads: int
    max_in_flight: int
    device_maps: Mapping[str, DeviceMap]
    devices: Sequence[torch.device]
    secret: bytes | None
    listen: str | None  # None: to this host only
    allow: Sequence[str] | None


def resolve_options(options: Any, env: Mapping[str, str] = os.environ) -> AgentOptions:
    """Fill in what is not given. Takes torch's own options object too, by its attributes."""
    secret = getattr(options, "secret", None) or env.get("WEFT_RPC_SECRET") or None
    if isinstance(secret, str):
        secret = secret.encode()
    listen = getattr(options, "listen", None) or env.get("WEFT_RPC_LISTEN") or ""
    return AgentOptions(
        timeout_secs=options.rpc_timeout,
        num_threads=getattr(options, "num_worker_threads", constants.DEFAULT_NUM_WORKER_THREADS),
        max_in_flight=getattr(options, "max_in_flight", constants.DEFAULT_MAX_IN_FLIGHT),
        device_maps=dict(getattr(options, "device_maps", {})),
        devices=list(getattr(options, "devices", [])),
        secret=secret,
        listen=None if listen in _LOOPBACK else listen,
        allow=getattr(options, "allow", None),
    )


def check_timeout(secs: Any) -> float:
    """A timeout in seconds as a float. Raises for anything that is no number, or less than 0."""
    if isinstance(secs, bool) or not isinstance(secs, int | float):
        raise ConfigTypeError(
            f"RPC options: incompatible constructor arguments: rpc_timeout must be a number of seconds, not "
            f"{secs!r}, a {type(secs).__name__}."
        )
    if secs < 0:
        raise ConfigError(f"RPC options: rpc_timeout must be 0 (none) or more seconds, not {secs}.")
    return float(secs)
