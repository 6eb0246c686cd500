"""The arguments of DistributedDataParallel and replicate, checked and resolved before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.group import resolve_group
from weft.errors import ConfigError, UnfitError


def resolve_process_group(process_group: object, device_mesh: DeviceMesh | None) -> ProcessGroup:
    """The group that a process group, or a mesh of one axis, or neither, means."""
    if device_mesh is None:
        return resolve_group(process_group)
    if process_group is not None:
        raise UnfitError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise UnfitError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Pass the slice of the axis to "
            "replicate over, mesh['dp'] say."
        )
    return device_mesh.get_group(mesh_dim=0)


def resolve_buffer_sync(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are synced at the start, and at each forward."""
    if forward_sync_buffers is None:
        wanted = True if broadcast_buffers is None else broadcast_buffers
        return wanted, wanted
    if broadcast_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified; the latter counts.",
            FutureWarning,
            stacklevel=3,
        )
    return True, forward_sync_buffers


def resolve_device_ids(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """The device that inputs are moved to, and the one for outputs; None where inputs stay as they are."""
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in module.parameters()}
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ConfigError(
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            f"module parameters locate in {types}."
        )
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None, None
    first = _device_index(device_ids[0])
    return [first], first if output_device is None else _device_index(output_device)


def _device_index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    named = torch.device(device)
    return torch.accelerator.current_device_index() if str(named) == named.type else named.index


def resolve_delayed(
    delay_all_reduce_named_params: Sequence[tuple[str, torch.Tensor]] | None,
    param_to_hook_all_reduce: torch.Tensor | None,
) -> tuple[str, ...]:
    """The names of parameters whose reduction goes last."""
    if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
        raise ConfigError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    return tuple(name for name, _ in delay_all_reduce_named_params or ())
