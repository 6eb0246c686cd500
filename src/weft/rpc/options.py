"""What can be set for a worker: torch's options, and what weft adds to them.

Added: `secret`, `listen`, `allow` and `max_in_flight`. Environment variables fill in what is not given:
WEFT_RPC_SECRET, which is removed from it, and WEFT_RPC_LISTEN.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import ConfigError, ConfigTypeError
from weft.rpc import constants
from weft.rpc.devices import DeviceMap, as_device_list, as_device_map, merge_device_maps
from weft.rpc.secret import check_secret, resolve_secret
from weft.trust import JobSecret

DeviceType = int | str | torch.device
_MAX_SECS = 1e9  # thirty years; Python's and torch's waits overflow at some hundred years
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

    `secret`: the secret of all workers, 16 bytes or more; the job's own by default. `listen`: the address
    other hosts reach this one by; by default only workers of this host can connect. `allow`: the functions
    and classes that peers may use, as prefixes of qualified names; everything by default. `max_in_flight`:
    how many calls to one worker may be unanswered before the next one waits.

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
        self.num_worker_threads = _check_count(num_worker_threads, "num_worker_threads")
        self.max_in_flight = _check_count(max_in_flight, "max_in_flight")
        self.device_maps: dict[str, DeviceMap] = {
            name: as_device_map(device_map) for name, device_map in (device_maps or {}).items()
        }
        self.devices = as_device_list(devices or [])
        self.secret = None if secret is None else check_secret(secret)
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
    secret: JobSecret | None
    listen: str | None  # None: to this host only
    allow: Sequence[str] | None


def resolve_options(options: Any, env: Mapping[str, str] = os.environ) -> AgentOptions:
    """Fill in what is not given. Takes torch's own options object too, by its attributes."""
    listen = getattr(options, "listen", None) or env.get("WEFT_RPC_LISTEN") or ""
    return AgentOptions(
        timeout_secs=check_timeout(options.rpc_timeout),
        num_threads=getattr(options, "num_worker_threads", constants.DEFAULT_NUM_WORKER_THREADS),
        max_in_flight=getattr(options, "max_in_flight", constants.DEFAULT_MAX_IN_FLIGHT),
        device_maps=dict(getattr(options, "device_maps", {})),
        devices=list(getattr(options, "devices", [])),
        secret=resolve_secret(getattr(options, "secret", None)),
        listen=None if listen in _LOOPBACK else listen,
        allow=getattr(options, "allow", None),
    )


def check_timeout(secs: Any) -> float:
    """Check the option rpc_timeout; returns it as a float."""
    return check_secs(secs, "RPC options: incompatible constructor arguments: rpc_timeout")


def check_secs(secs: Any, name: str) -> float:
    """Check a timeout in seconds, 0 for no limit; returns it as a float. Raises unless finite and >= 0."""
    if isinstance(secs, bool) or not isinstance(secs, numbers.Real):
        raise ConfigTypeError(f"{name} must be a number of seconds, not {secs!r}, a {type(secs).__name__}.")
    try:
        secs = float(secs)
    except OverflowError:
        secs = float("inf")
    if not 0 <= secs <= _MAX_SECS:
        raise ConfigError(
            f"{name} must be 0 (none) or more seconds, and {_MAX_SECS:g} at most, not {secs}. Give 0 for no "
            "limit."
        )
    return secs


def _check_count(count: Any, name: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigTypeError(f"RPC options: {name} must be an int, not {count!r}, a {type(count).__name__}.")
    if count < 1:
        raise ConfigError(f"RPC options: {name} must be at least 1, not {count}.")
    return count
