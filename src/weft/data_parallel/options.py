"""How a module is replicated: arguments, resolved and checked before anything is changed.

And the agreement of ranks on the module itself: every rank has the same parameters in the same order.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft import comm
from weft.comm.group import resolve_group, state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.bucket_plan import BucketCaps, ParamSpec
from weft.data_parallel.buffers import BROADCAST_BYTES
from weft.errors import ConfigError, DesyncError, UnfitError


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How a module is replicated. Parameters are named as in the module."""

    group: ProcessGroup
    caps: BucketCaps = field(default_factory=BucketCaps)
    ignored_names: Collection[str] = ()
    delayed_names: Collection[str] = ()
    init_sync: bool = True
    init_sync_buffers: bool = True
    forward_sync_buffers: bool = True
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    device: torch.device | None = None  # inputs are moved there
    broadcast_bytes: int = BROADCAST_BYTES  # at most, in one message of parameters or buffers


def resolve_process_group(process_group: object, device_mesh: DeviceMesh | None) -> ProcessGroup:
    """The process group given, that of a mesh with one axis, or the world's."""
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
    """Whether buffers are broadcast when the module is wrapped, and at each forward."""
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
    """The device for inputs and the one for outputs; None where inputs aren't moved."""
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
    """The names of parameters that are reduced last."""
    if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
        raise ConfigError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    return tuple(name for name, _ in delay_all_reduce_named_params or ())


def check_same_model(specs: Sequence[ParamSpec], group: ProcessGroup) -> None:
    """Raise DesyncError on every rank, with the first difference, where ranks have different parameters."""
    if group.size() == 1:
        return
    lines = [_describe(spec) for spec in specs]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=specs[0].device)
    gathered = torch.empty(group.size() * len(digest), dtype=torch.uint8, device=specs[0].device)
    comm.all_gather_into_tensor(gathered, mine, group, feature=FEATURE).wait()
    digests = gathered.view(group.size(), -1)
    if bool((digests == digests[0]).all()):
        return
    everyone: list[list[str]] = comm.all_gather_object(lines, group, feature=FEATURE).wait()
    ranks = state_of(group).ranks
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs != everyone[0]:
            raise DesyncError(_first_difference(ranks[0], everyone[0], rank, theirs), (rank,))


def _describe(spec: ParamSpec) -> str:
    kind = " with sparse gradients" if spec.is_sparse else f", {spec.piece}" if spec.piece else ""
    return f"'{spec.name}' of shape {list(spec.shape)}, {str(spec.dtype).removeprefix('torch.')}{kind}"


def _first_difference(first: int, ours: list[str], rank: int, theirs: list[str]) -> str:
    if len(ours) != len(theirs):
        head = (
            f"DDP expects same model across all ranks, but Rank {rank} has {len(theirs)} params, "
            f"while rank {first} has inconsistent {len(ours)} params"
        )
    else:
        head = "DDP expects same model across all ranks, but parameters differ"
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            found = f"params[{at}] is {one} on rank {first} and {other} on rank {rank}"
            break
    else:
        at = min(len(ours), len(theirs))
        longer, which = (theirs, rank) if len(theirs) > len(ours) else (ours, first)
        found = f"params[{at}] is there on rank {which} only: {longer[at]}"
    return (
        f"{head}. The first difference: {found}, which appears not to match. Build the same module on "
        "every rank."
    )
