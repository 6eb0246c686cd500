"""`fully_shard` and `replicate_with_fsdp`: check what is asked for, then shard.

Invariant: what can't work is noticed before anything is changed. Managed modules come children first,
parameters in the order of their modules, each once: ranks with the same model get the same order.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private: named here only

from weft.errors import ConfigError, RefusedError, UnsupportedError
from weft.fsdp.join import ShardedJoinable
from weft.fsdp.mesh import DataParallelMesh, DataParallelMeshDims, resolve_mesh, resolve_post_forward_mesh
from weft.fsdp.module import FSDPModule, StageState
from weft.fsdp.param import Site, shard_parameter
from weft.fsdp.param_group import ParamGroup
from weft.fsdp.placement import resolve_placement
from weft.fsdp.policy import CPUOffloadPolicy, GroupSettings, MixedPrecisionPolicy, OffloadPolicy
from weft.fsdp.state import ModuleState, find_state
from weft.fsdp.state_dict import with_save_pretrained
from weft.modules import attach, check_free, enter_state, give_class, owners_below, sharded_base

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class ShardOptions:
    """What a call of fully_shard, or of replicate_with_fsdp, asks for."""

    dp_mesh: DataParallelMesh
    settings: GroupSettings
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    shard_placement_fn: ShardPlacementFn | None = None
    keeps_root_unsharded: bool = False

    @property
    def shard_device(self) -> torch.device:
        """The device of the shards."""
        is_offloaded = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu") if is_offloaded else self.dp_mesh.device

    @property
    def is_pinned(self) -> bool:
        """Whether shards are in page-locked memory."""
        policy = self.offload_policy
        return (
            isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and self.dp_mesh.device.type != "cpu"
        )


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

    Apply it to the inner modules first, then to the model: each call makes one group of the parameters that
    no inner one has, all-gathered and reduced together. Parameters become DTensors, sharded on dim 0 or as
    `shard_placement_fn(param)` says; for forward and backward they are unsharded. A mesh of two axes
    replicates over the first and shards over the second.

    `reshard_after_forward`: True reshards parameters after forward; False keeps them unsharded for backward;
    a number shards them over so many neighbours until then; None is True, and False for the root.

    Every rank of the mesh must call it alike. Raises ConfigError for what can't work; nothing is changed
    then.
    """
    modules = resolve_modules(module, "fully_shard")
    dp_mesh = resolve_mesh(mesh, dp_mesh_dims)
    if dp_mesh_dims is not None and _is_number(reshard_after_forward):
        raise UnsupportedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims). Use True or "
            "False."
        )
    wanted: bool | int = True if reshard_after_forward is None else reshard_after_forward
    is_sharded = dp_mesh.shard_group is not None
    post_forward_mesh = resolve_post_forward_mesh(dp_mesh, wanted) if is_sharded else None
    options = ShardOptions(
        dp_mesh,
        GroupSettings(post_forward_mesh=post_forward_mesh),
        mp_policy,
        offload_policy,
        ignored_params,
        shard_placement_fn,
        keeps_root_unsharded=reshard_after_forward is None,
    )
    shard(modules, options, "fully_shard", FSDPModule)
    return module


def shard(
    modules: Sequence[nn.Module], options: ShardOptions, feature: str, methods: type[FSDPModule]
) -> None:
    """Shard the modules as one group, and give them `methods`. Raises, before anything is changed, for what
    can't work.
    """
    for module in modules:
        check_free(module, feature)
    dp_mesh, ignored, placement_fn = options.dp_mesh, options.ignored_params, options.shard_placement_fn
    taken = {owner for module in modules for owner in owners_below(module)}
    managed = managed_modules(modules, ignored, lambda part: part in taken)
    found = managed_parameters(managed, ignored)
    _check_placeable(found, dp_mesh, placement_fn)
    move_to_device([param for _, param, _ in found], managed_buffers(managed), dp_mesh.device)
    device, is_pinned = options.shard_device, options.is_pinned
    params = [
        shard_parameter(name, param, sites, dp_mesh, placement_fn, device, is_pinned=is_pinned)
        for name, param, sites in found
    ]
    policy = options.mp_policy
    groups: list[ParamGroup] = []
    if params:
        groups.append(ParamGroup(params, dp_mesh, policy, options.settings, device, is_pinned=is_pinned))
    state = ModuleState(
        modules, groups, policy, dp_mesh.device, keeps_root_unsharded=options.keeps_root_unsharded
    )
    for module in modules:
        attach(module, feature, state)
        enter_state(module, StageState(state))
        prefix, first = methods.__name__.removesuffix("Module"), with_save_pretrained(type(module), methods)
        give_class(module, ShardedJoinable, prefix, first, nominal=sharded_base())
    state.install_hooks()
    for group in groups:
        group.prepare()


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

    Parameters become replicated DTensors, so that they go together with sharded ones in one model and one
    optimizer. Nothing is all-gathered; gradients are all-reduced, one collective for each module of a call.
    Ranks must start with equal parameters: they are not compared. Inner modules that fully_shard holds stay
    sharded. Raises ConfigError for what can't work; nothing is changed then.
    """
    modules = resolve_modules(module, "replicate")
    dp_mesh = resolve_mesh(mesh, dp_mesh_dims, replicate_only=True)
    settings = GroupSettings(post_forward_mesh=None)
    options = ShardOptions(dp_mesh, settings, mp_policy, offload_policy, ignored_params)
    shard(modules, options, "replicate_with_fsdp", ReplicateModule)
    return module


def resolve_modules(module: Any, what: str) -> list[nn.Module]:
    """The modules that a call is applied to. `what` is the function's name."""
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
    found: list[tuple[str, nn.Parameter, list[Site]]],
    dp_mesh: DataParallelMesh,
    placement_fn: ShardPlacementFn | None,
) -> None:
    for name, param, _ in found:
        if param.device == dp_mesh.device or param.device.type == "meta":
            resolve_placement(name, param, dp_mesh, None if placement_fn is None else placement_fn(param))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method than forward unshard the module, too. No effect on a module without shards."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ConfigError(
            f"{type(module)} does not have a method {method_name}. Give the name of one that it has."
        )
    method: Any = getattr(module, method_name)
    bare = getattr(method, "__func__", None)  # called with whichever module has it: a copy has its own

    @functools.wraps(method)
    def forward_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = find_state(self)
        assert state is not None
        args, kwargs = state.pre_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs) if bare is None else bare(self, *args, **kwargs)
        except Exception:
            state.post_forward(self, args, None)
            raise
        return state.post_forward(self, args, output)

    setattr(module, method_name, types.MethodType(forward_method, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several sharded roots share their streams, as the stages of a pipeline do.

    weft's collectives run where their group runs them, and the roots share that already; so this only checks.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Expects list of FSDPModules but got {module}. Apply fully_shard to it first.")


fully_shard.state = find_state  # type: ignore[attr-defined]
replicate_with_fsdp.state = find_state  # type: ignore[attr-defined]


# The modules, parameters and buffers that a call manages


def check_module(module: nn.Module, what: str) -> None:
    """Raise ConfigError for a container without a forward; `what` is the function that was called with it."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{what} does not support containers that do not implement forward: {module}. Its hooks would "
            "never run. Call it on the modules inside, on a list of them, or on the module that calls them."
        )


def root_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are inside no other one, each once, in the order given."""
    unique = list(dict.fromkeys(modules))
    inside = {part for module in unique for part in module.modules() if part is not module}
    return [module for module in unique if module not in inside]


def managed_modules(
    roots: Sequence[nn.Module],
    ignored: set[nn.Parameter] | None,
    is_taken: Callable[[nn.Module], bool],
) -> list[nn.Module]:
    """The topmost of `roots` and all that is inside them, children first.

    Left out: modules that another call holds (`is_taken`; never asked of a root) with all that is inside
    them, and modules that have no buffer and only ignored parameters, all inside included.
    """
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen and not is_taken(child):
                visit(child)
        found.append(module)

    for root in root_modules(roots):
        visit(root)
    if not ignored:
        return found
    return [module for module in found if not _is_ignored(module, ignored)]


def managed_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter] | None
) -> list[tuple[str, nn.Parameter, list[Site]]]:
    """The parameters of managed modules, tied ones once, with a name and every site within those modules.

    The name is the path from the topmost managed module. Raises ConfigError for a parameter without dims.
    """
    prefixes = _prefixes(modules)
    found: dict[nn.Parameter, tuple[str, list[Site]]] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or (ignored is not None and param in ignored):
                continue
            if param.ndim == 0:
                raise ConfigError(
                    f"fully_shard doesn't support scalar parameters. Change {prefixes[module]}{name} to a 1D "
                    "tensor with numel equal to 1."
                )
            _, sites = found.setdefault(param, (prefixes[module] + name, []))
            sites.append(Site(module, name))
    return [(name, param, sites) for param, (name, sites) in found.items()]


def managed_buffers(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The buffers of managed modules, each once."""
    return list(dict.fromkeys(buffer for module in modules for buffer in module.buffers(recurse=False)))


def move_to_device(
    params: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device
) -> None:
    """Bring parameters and buffers to the device, in place. Those on the meta device stay there.

    Raises ConfigError for a DTensor of another kind of device, before anything has moved.
    """
    elsewhere = [
        tensor
        for tensor in itertools.chain(params, buffers)
        if tensor.device != device and tensor.device.type != "meta"
    ]
    for tensor in elsewhere:
        if isinstance(tensor, DTensor):
            _refuse_to_move(tensor, device)
    for tensor in elsewhere:
        moved = tensor.detach().to(device)
        if is_traceable_wrapper_subclass(tensor):
            # Its data are inner tensors, which assigning to .data would not replace.
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = moved


def _refuse_to_move(tensor: DTensor, device: torch.device) -> None:
    kind = tensor.device_mesh.device_type
    if kind != device.type:
        raise ConfigError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh "
            f"but got {kind} for DTensor and {device.type} for FSDP. Make both meshes with "
            f"init_device_mesh('{device.type}', ...)."
        )
    raise RefusedError(
        f"Expects DTensor to be moved to {kind} but got {tensor.device}: this rank's device is {device}. "
        "Select the device before the DTensor is made, or move it."
    )


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    return next(module.buffers(), None) is None and all(param in ignored for param in module.parameters())


def _prefixes(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The path to each managed module from the topmost one that has it, with its last dot."""
    managed = set(modules)
    inside = {child for module in modules for child in module.children()}
    prefixes: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in managed and module not in prefixes:
            prefixes[module] = prefix
            for name, child in module.named_children():
                visit(child, f"{prefix}{name}.")

    for module in modules:
        if module not in inside:
            visit(module, "")
    return prefixes
