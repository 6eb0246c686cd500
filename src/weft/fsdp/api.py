"""`fully_shard`: check what is asked for, then shard."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from weft.errors import ConfigError, UnsupportedError
from weft.fsdp.choose import (
    Site,
    check_module,
    managed_buffers,
    managed_modules,
    managed_parameters,
    move_to_device,
    root_modules,
)
from weft.fsdp.group import ParamGroup
from weft.fsdp.mesh import DataMesh, resolve_mesh, smaller_mesh
from weft.fsdp.module import FSDPModule
from weft.fsdp.pipelined import StageState
from weft.fsdp.placement import place
from weft.fsdp.policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from weft.fsdp.pretrained import with_saving
from weft.fsdp.settings import Settings
from weft.fsdp.sharding import shard_parameter
from weft.fsdp.state import ModuleState
from weft.fsdp.tree import find_state
from weft.fsdp.uneven import ShardedJoinable
from weft.modules import attach, check_free, enter_state, give_class, owners_below, sharded_base

FEATURE = "fully_shard"

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(module: M, **kwargs: Any) -> M: ...
@overload
def fully_shard(module: list[M], **kwargs: Any) -> list[M]: ...


def fully_shard(  # type: ignore[misc]
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the module's parameters over the ranks of the mesh, in place; returns the module.

    Apply it to the inner modules first, then to the whole: each call makes one group of the parameters that
    no inner one has, gathered and reduced together. Parameters become DTensors, sharded on dim 0 or as
    `shard_placement_fn(param)` says; for forward and backward they are gathered. A mesh of two axes
    replicates over the first and shards over the second.

    `reshard_after_forward`: True frees parameters after forward; False keeps them for backward; a number
    keeps them sharded over so many neighbours; None is True, and False for the root.

    Every rank of the mesh must call it alike. Raises ConfigError for what can't work; nothing is changed
    then.
    """
    modules = resolve_modules(module, FEATURE)
    data = resolve_mesh(mesh, dp_mesh_dims)
    keeps_root_whole = reshard_after_forward is None
    if dp_mesh_dims is not None and _is_number(reshard_after_forward):
        raise UnsupportedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims). Use True or "
            "False."
        )
    wanted: bool | int = True if reshard_after_forward is None else reshard_after_forward
    after_forward = None if data.shard_group is None else smaller_mesh(data, wanted)
    shard(
        modules,
        data,
        Settings(after_forward=after_forward),
        FEATURE,
        placement_fn=shard_placement_fn,
        policy=mp_policy,
        offload=offload_policy,
        ignored=ignored_params,
        keeps_root_whole=keeps_root_whole,
    )
    return module


def shard(
    modules: Sequence[nn.Module],
    data: DataMesh,
    settings: Settings,
    feature: str,
    *,
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter] | None,
    keeps_root_whole: bool,
    methods: type[FSDPModule] = FSDPModule,
) -> None:
    """Make sharded modules of them. What can't work is noticed before anything is changed."""
    for module in modules:
        check_free(module, feature)
    taken = {owner for module in modules for owner in owners_below(module)}
    managed = managed_modules(modules, ignored, lambda part: part in taken)
    found = managed_parameters(managed, ignored)
    _check_placeable(found, data, placement_fn)
    move_to_device([param for _, param, _ in found], managed_buffers(managed), data.device)
    shard_device = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else data.device
    is_pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and data.device.type != "cpu"
    params = [
        shard_parameter(name, param, sites, data, placement_fn, shard_device, is_pinned=is_pinned)
        for name, param, sites in found
    ]
    groups: list[ParamGroup] = []
    if params:
        groups.append(ParamGroup(params, data, policy, settings, shard_device, is_pinned=is_pinned))
    state = ModuleState(modules, groups, policy, data.device, keeps_root_whole=keeps_root_whole)
    for module in modules:
        attach(module, feature, state)
        enter_state(module, StageState(state))
        prefix, first = methods.__name__.removesuffix("Module"), with_saving(type(module), methods)
        give_class(module, ShardedJoinable, prefix, first, nominal=sharded_base())
    state.install()
    for group in groups:
        group.prepare()


def resolve_modules(module: Any, what: str) -> list[nn.Module]:
    """The modules that a call is about. `what` is the function's name."""
    if isinstance(module, nn.Module):
        check_module(module, what)
        return [module]
    if not isinstance(module, list | tuple) or not module:
        raise ConfigError(f"{what} takes a module or a list of modules, got {type(module).__name__}.")
    modules = root_modules(cast("list[nn.Module]", module))
    for part in modules:
        check_module(part, what)
    return modules


def _check_placeable(
    found: list[tuple[str, nn.Parameter, list[Site]]], data: DataMesh, placement_fn: ShardPlacementFn | None
) -> None:
    for name, param, _ in found:
        if param.device == data.device or param.device.type == "meta":
            place(name, param, data, None if placement_fn is None else placement_fn(param))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method than forward gather the module's parameters as well. Does nothing for a plain
    module.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ConfigError(
            f"{type(module)} does not have a method {method_name}. Give the name of one that it has."
        )
    method: Any = getattr(module, method_name)
    bare = getattr(method, "__func__", None)  # called with whichever module has it: a copy has its own

    @functools.wraps(method)
    def gathering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = find_state(self)
        assert state is not None
        args, kwargs = state.before_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs) if bare is None else bare(self, *args, **kwargs)
        except Exception:
            state.after_forward(self, args, None)
            raise
        return state.after_forward(self, args, output)

    setattr(module, method_name, types.MethodType(gathering, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several sharded roots share their streams, as the stages of a pipeline do.

    weft's collectives run where their group runs them, and the roots share that already; so this only checks.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Expects list of FSDPModules but got {module}. Apply fully_shard to it first.")


fully_shard.state = find_state  # type: ignore[attr-defined]
