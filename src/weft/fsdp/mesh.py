"""The ranks that share a module's data-parallel work: from a user's mesh, or none, to process groups.

Invariant: a DataParallelMesh is made of meshes and groups that every rank in them made alike, in the same
order. How a parameter lies on such a mesh is placement.py's.

Private torch names, here only: `DeviceMesh._flatten` (several axes as one), `DeviceMesh._concatenate` (axes
of one root mesh side by side).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.comm.group import resolve_group
from weft.comm.simulated import check_one_rank
from weft.errors import ConfigError, InternalError, RefusedError, StateError, UnfitError
from weft.torch_private import check_torch

logger = logging.getLogger(__name__)

FEATURE = "fsdp"  # of the events of all collectives of fully_shard


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh share data, by name, where parameters are DTensors on the whole of that mesh.

    `shard`: the axes that parameters are sharded over. `replicate`: those that hold the same shards. Several
    names act as one axis. Raises ConfigError when neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "At least one of shard or replicate must be set in DataParallelMeshDims. Name the mesh axes "
                "that parameters are sharded over as shard, those that hold the same shards as replicate."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over; empty for none."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes that hold the same shards; empty for none."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True, eq=False)
class DataParallelMesh:
    """The ranks that share a module's data-parallel work.

    It is sharded over some of them, and others hold the same shard.
    """

    mesh: DeviceMesh  # 1-D (shard or replicate) or 2-D (replicate, shard)
    shard_group: dist.ProcessGroup | None  # None: nothing is sharded
    replicate_group: dist.ProcessGroup | None  # None: no other rank holds the same shard
    dims: DataParallelMeshDims | None = None  # given: `spmd_mesh` is the mesh of the parameters' DTensors
    spmd_mesh: DeviceMesh | None = None
    _joined: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict[DeviceMesh, DeviceMesh], repr=False)

    @cached_property
    def shard_size(self) -> int:
        """The number of ranks that a parameter is sharded over."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @cached_property
    def shard_rank(self) -> int:
        """This rank in the shard group."""
        return 0 if self.shard_group is None else self.shard_group.rank()

    @cached_property
    def replicate_size(self) -> int:
        """The number of ranks that hold the same shard."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @cached_property
    def replicate_rank(self) -> int:
        """This rank among those with the same shard."""
        return 0 if self.replicate_group is None else self.replicate_group.rank()

    @cached_property
    def device(self) -> torch.device:
        """This rank's device: the CPU, or the device that was current when first asked."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that there are, the shard group first."""
        return [group for group in (self.shard_group, self.replicate_group) if group is not None]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The global ranks of the mesh."""
        return frozenset(self.mesh.mesh.flatten().tolist())

    @cached_property
    def join_group(self) -> dist.ProcessGroup:
        """One group of all ranks of the mesh, which run out of inputs together (weft.join).

        Every rank of the mesh must ask for it alike: on a mesh of two axes the first time may make the group.
        """
        for group in (*self.groups, resolve_group(None)):
            if self.ranks == frozenset(dist.get_process_group_ranks(group)):
                return group
        made = dist.new_group(sorted(self.ranks), use_local_synchronization=True)
        return cast(dist.ProcessGroup, made)

    @cached_property
    def other_axes(self) -> tuple[list[int], list[int]]:
        """The axes of `spmd_mesh` that don't share data: left of the first shard axis, and right of it."""
        if self.dims is None or self.spmd_mesh is None or not self.dims.shard_names:
            raise InternalError("this data mesh has no named shard axes")
        names = self.spmd_mesh.mesh_dim_names or ()
        first = names.index(self.dims.shard_names[0])
        own = {*self.dims.shard_names, *self.dims.replicate_names}
        others = [axis for axis, name in enumerate(names) if name not in own]
        return [axis for axis in others if axis < first], [axis for axis in others if axis > first]

    @cached_property
    def flattened_mesh(self) -> DeviceMesh:
        """`spmd_mesh` with this mesh for its data-parallel axes, where the first shard axis was."""
        left, right = self.other_axes
        spmd_mesh = cast(DeviceMesh, self.spmd_mesh)
        names = spmd_mesh.mesh_dim_names or ()
        axes = [spmd_mesh[names[axis]] for axis in left], [spmd_mesh[names[axis]] for axis in right]
        return join_axes([*axes[0], self.mesh, *axes[1]])

    def joined_with(self, other: DeviceMesh) -> DeviceMesh:
        """This mesh's axes and then those of `other`: the mesh of parameters that are sharded over both.

        Raises UnfitError where they are not named axes of one mesh.
        """
        joined = self._joined.get(other)
        if joined is None:
            joined = self._joined[other] = join_axes([self.mesh, other])
        return joined


def resolve_mesh(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None, *, replicate_only: bool = False
) -> DataParallelMesh:
    """The data-parallel mesh that a user means: by default the world, on the accelerator if there is one.

    `dims` names the axes of `mesh` that share data, where parameters are DTensors on all of it. Without
    it a mesh of one axis shards, one of two replicates over the first and shards over the second.
    `replicate_only` is for replicate_with_fsdp: one axis, nothing sharded.

    Every rank of the mesh must call it, since it may make groups. Raises ConfigError for meshes that
    can't be used, StateError where no world is there.
    """
    check_torch()
    if mesh is None:
        mesh = default_mesh("replicate" if replicate_only else None)
    if mesh.size() > 1:
        check_one_rank("replicate" if replicate_only else "fully_shard")
    check_mesh(mesh, dims, replicate_only=replicate_only)
    if dims is not None:
        return _resolve_named(mesh, dims)
    if replicate_only:
        return DataParallelMesh(mesh, None, mesh.get_group(0))
    if mesh.ndim == 1:
        return DataParallelMesh(mesh, mesh.get_group(0), None)
    return DataParallelMesh(mesh, mesh.get_group(1), mesh.get_group(0))


def check_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None, *, replicate_only: bool) -> None:
    """Raise ConfigError for a mesh that fully_shard, or replicate_with_fsdp, can't work with."""
    if dims is not None:
        _check_names(mesh, dims, replicate_only=replicate_only)
    elif replicate_only and mesh.ndim != 1:
        raise ConfigError(
            f"replicate expects a 1D DeviceMesh but got {mesh}. Give it one axis, mesh['name'], or name the "
            "axes in DataParallelMeshDims(replicate=...) where the parameters are DTensors on the whole mesh."
        )
    elif mesh.ndim not in (1, 2):
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Give it the axes that share data, as "
            "mesh['replicate', 'shard'], or name them in dp_mesh_dims."
        )
    elif mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise RefusedError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: "
            f"init_device_mesh('{mesh.device_type}', {tuple(mesh.shape)}, mesh_dim_names=('replicate', "
            "'shard'))."
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh}; only its ranks may call fully_shard with it. Call it "
            "on those alone, or make a mesh that has all ranks."
        )


def resolve_post_forward_mesh(
    dp_mesh: DataParallelMesh, reshard_after_forward: bool | int
) -> DataParallelMesh | None:
    """The mesh that parameters are sharded over between forward and backward; None if they stay unsharded.

    True is all of `dp_mesh`. A number n is groups of n neighbours: every rank of `dp_mesh` must call it
    alike, for it makes those groups, once for each n. Raises ConfigError for an n that doesn't divide the
    shard group.
    """
    size = reshard_after_forward
    if not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise ConfigError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"not {size}"
        )
    if isinstance(size, bool):
        return dp_mesh if size else None
    if size < 1 or dp_mesh.shard_size % size:
        raise ConfigError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{dp_mesh.shard_size}, not {size}: parameters are sharded over {dp_mesh.shard_size} ranks."
        )
    if size == 1:
        _warn_of_one()
        return None
    if size == dp_mesh.shard_size:
        return dp_mesh
    return _neighbours(dp_mesh, size)


def join_axes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The axes of several meshes as one mesh. Raises UnfitError unless all are named axes of one mesh."""
    unnamed = [mesh for mesh in meshes if mesh.mesh_dim_names is None]
    if unnamed:
        raise UnfitError(
            f"the axes of {unnamed[0]} have no names, and it is to be one mesh with {meshes[-1]}. Make one "
            "mesh with init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and take mesh['dp'] and "
            "mesh['tp'] from it."
        )
    concatenate = cast("Callable[[list[DeviceMesh]], DeviceMesh]", cast(Any, DeviceMesh)._concatenate)
    try:
        return concatenate(list(meshes))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UnfitError(
            f"{' and '.join(map(str, meshes))} can't be one mesh: {error}. Make one mesh with "
            "init_device_mesh that has all the axes, and take each of these from it, as mesh['dp'] and "
            "mesh['tp']."
        ) from error


def _check_names(mesh: DeviceMesh, dims: DataParallelMeshDims, *, replicate_only: bool) -> None:
    if not (dims.shard_names or dims.replicate_names):
        raise ConfigError("At least one of shard or replicate must be set in dp_mesh_dims; both are empty.")
    if replicate_only and dims.shard_names:
        raise ConfigError(
            "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use fully_shard() "
            f"for sharding. It was given shard={dims.shard!r}."
        )
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            f"mesh must have mesh_dim_names when dp_mesh_dims is provided, and {mesh} has none. Give them to "
            "init_device_mesh."
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ConfigError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}. "
                "dp_mesh_dims may name those only."
            )
    for names in (dims.shard_names, dims.replicate_names):
        if list(names) != sorted(set(names), key=mesh.mesh_dim_names.index):
            raise ConfigError(
                f"dp_mesh_dims names the axes {names}; several that act as one must stand in the mesh's "
                f"order, {mesh.mesh_dim_names}, each once."
            )
    if both := set(dims.shard_names) & set(dims.replicate_names):
        raise ConfigError(
            f"dp_mesh_dims names {sorted(both)} both as shard and as replicate; choose one for each."
        )


def _resolve_named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMesh:
    shard = _as_one_axis(mesh, dims.shard_names)
    replicate = _as_one_axis(mesh, dims.replicate_names)
    if replicate is None:
        assert shard is not None  # check_mesh saw that one of them has names
        return DataParallelMesh(shard, shard.get_group(0), None, dims, mesh)
    if shard is None:
        return DataParallelMesh(replicate, None, replicate.get_group(0), dims, mesh)
    both = join_axes([replicate, shard])
    return DataParallelMesh(both, shard.get_group(0), replicate.get_group(0), dims, mesh)


def _as_one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if not names:
        return None
    if len(names) == 1:
        return mesh[names[0]] if mesh.ndim > 1 else mesh
    return mesh[names]._flatten("_".join(names))


@cache  # once a process
def _warn_of_one() -> None:
    logger.warning(
        "fully_shard: reshard_after_forward=1 leaves parameters unsharded after forward. Write False for "
        "that, True to reshard them."
    )


# By shard group, then by size and ranks. Groups take memory and connections, and a model asks once a layer.
_neighbour_meshes: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[object, ...], DataParallelMesh]
] = weakref.WeakKeyDictionary()


def _neighbours(dp_mesh: DataParallelMesh, size: int) -> DataParallelMesh:
    assert dp_mesh.shard_group is not None  # its size has a factor
    made = _neighbour_meshes.setdefault(dp_mesh.shard_group, {})
    ranks = dp_mesh.mesh.mesh.reshape(-1, size)
    key = (dp_mesh.mesh.device_type, size, tuple(ranks.flatten().tolist()))
    if key not in made:
        mesh = _make_mesh(dp_mesh.mesh.device_type, ranks)
        made[key] = DataParallelMesh(mesh, mesh.get_group(1), mesh.get_group(0))
    return made[key]


def _make_mesh(kind: str, ranks: torch.Tensor) -> DeviceMesh:
    names = ("replicate", "shard")
    if ranks.numel() == dist.get_world_size():
        return DeviceMesh(kind, ranks, mesh_dim_names=names)
    # Ranks outside have a mesh of their own to make at this moment: the groups' names must tell them apart.
    row, column = (int(index) for index in (ranks == dist.get_rank()).nonzero()[0])
    members = ranks[:, column].tolist(), ranks[row].tolist()
    groups = [dist.new_group(group, use_local_synchronization=True) for group in members]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)  # pyright: ignore[reportArgumentType]


# The mesh that is meant where none was given: the whole world, on the accelerator if there is one


# The world's mesh, by name of its axis: making it twice may make a group twice. A mesh holds its groups, so
# that a dictionary by group would keep worlds alive; this keeps one a thread, until that thread has another.
class _LastDefault(threading.local):
    group: weakref.ref[dist.ProcessGroup] | None = None
    meshes: dict[str | None, DeviceMesh]


_last_default = _LastDefault()


def default_mesh(name: str | None) -> DeviceMesh:
    """A mesh of one axis, called `name`, that has all ranks; the same one until the world is another.

    Under torchrun it makes the world if nobody has. Raises StateError where there is none to make.
    """
    group = _world_group()
    if _last_default.group is None or _last_default.group() is not group:
        _last_default.group, _last_default.meshes = weakref.ref(group), {}
    mesh = _last_default.meshes.get(name)
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        _select_device(kind)
        names = None if name is None else (name,)
        mesh = _last_default.meshes[name] = init_device_mesh(kind, (group.size(),), mesh_dim_names=names)
    return mesh


def _world_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            raise StateError(
                "fully_shard: no process group is there, and no mesh was given. Call weft.init() first, or "
                "run the function with weft.launch() or torchrun."
            )
        dist.init_process_group()  # under torchrun the first use makes the world
    return resolve_group(None)


def _select_device(kind: str) -> None:
    """Choose this rank's device where nobody has, before DeviceMesh does: ranks may share one."""
    if kind == "cpu":
        return
    module: Any = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized() and module.device_count():
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        module.set_device(local_rank % module.device_count())
        module.init()
