"""`replicate_with_fsdp`: data parallel by the machinery of fully_shard, with a shard of all on every rank.

Parameters are DTensors that are replicated over the mesh, so that they go together with sharded ones in one
model and one optimizer. Nothing is gathered; gradients are all-reduced, one collective for each module it was
applied to.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.fsdp.api import resolve_modules, shard
from weft.fsdp.mesh import resolve_mesh
from weft.fsdp.module import FSDPModule
from weft.fsdp.policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from weft.fsdp.settings import Settings
from weft.fsdp.tree import find_state

FEATURE = "replicate_with_fsdp"


class ReplicateModule(FSDPModule):
    """A module whose parameters are replicated as DTensors."""


def replicate_with_fsdp(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Replicate the module's parameters over the ranks of a mesh of one axis, in place; returns the module.

    Ranks must start with equal parameters: they are not compared. Inner modules that fully_shard holds stay
    sharded. Raises ConfigError for what can't work; nothing is changed then.
    """
    modules = resolve_modules(module, "replicate")
    shard(
        modules,
        resolve_mesh(mesh, dp_mesh_dims, replicate_only=True),
        Settings(after_forward=None),
        FEATURE,
        placement_fn=None,
        policy=mp_policy,
        offload=offload_policy,
        ignored=ignored_params,
        keeps_root_whole=False,
        methods=ReplicateModule,
    )
    return module


replicate_with_fsdp.state = find_state  # type: ignore[attr-defined]
