"""How one parameter lies on the mesh: what is sharded, along which dim, and the DTensor that users see of it.

Invariant: fully_shard shards what a rank holds already. On a DTensor's own axes nothing moves, so that its
shards come last, wherever the data-parallel axis stands in the mesh. Nothing is allocated or sent here,
but where a DTensor gradient has to be brought to its parameter's placements.

Private torch names, here only: `_StridedShard`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import Placement as AxisPlacement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from weft import comm
from weft.errors import ConfigError, RefusedError, UnfitError, UnsupportedError
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.tensors import local_of, make_spec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a tensor of this shape is chunked along one dim, a chunk for each rank. Pure.

    As torch.chunk does it: equal chunks, the last ones shorter or empty. Shards are padded to the first one's
    size, so that all ranks send and receive the same number of elements.
    """

    shape: Shape
    dim: int
    num_ranks: int

    @property
    def chunk_length(self) -> int:
        """Of the first chunk, along the dim."""
        return -(-self.shape[self.dim] // self.num_ranks)

    @property
    def numel(self) -> int:
        """Of the full tensor."""
        return math.prod(self.shape)

    @property
    def padded_shard_numel(self) -> int:
        """Of a rank's shard, padding included."""
        return math.prod(self.padded_shard_shape)

    @property
    def padded_shard_shape(self) -> Shape:
        """Of a rank's shard, padding included."""
        return self._with_length(self.chunk_length)

    @property
    def padded_numel(self) -> int:
        """Of the shards side by side, without padding that is behind the full tensor."""
        return self.numel if self.has_contiguous_shards else self.num_ranks * self.padded_shard_numel

    @property
    def has_contiguous_shards(self) -> bool:
        """Whether the shards, one after another, are the full tensor as it lies in memory."""
        return self.num_ranks == 1 or math.prod(self.shape[: self.dim]) == 1

    def span(self, rank: int) -> tuple[int, int]:
        """Where a rank's shard begins along the dim, and its length."""
        start = min(rank * self.chunk_length, self.shape[self.dim])
        return start, min(self.chunk_length, self.shape[self.dim] - start)

    def shard_shape(self, rank: int) -> Shape:
        """Of a rank's shard, without padding."""
        return self._with_length(self.span(rank)[1])

    def _with_length(self, length: int) -> Shape:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Placement:
    """How one parameter is sharded: which tensor, along which dim, and what users see of it."""

    local: torch.Tensor  # what is sharded: the parameter, or a DTensor parameter's local tensor; detached
    dim: int  # of `local`
    sharded_spec: DTensorSpec
    unsharded_spec: DTensorSpec | None  # where the unsharded parameter is a DTensor
    data_parallel_axes: frozenset[int]  # axes of unsharded_spec's mesh over which fully_shard reduces


def resolve_placement(
    name: str, param: nn.Parameter, dp_mesh: DataParallelMesh, wanted: Shard | None
) -> Placement:
    """Decide how a parameter is sharded over the mesh: along the wanted dim, or the first.

    Raises ConfigError, RefusedError or UnsupportedError, naming the parameter, where it can't be.
    """
    check_parameter(name, param, dp_mesh)
    dim = resolve_dim(name, param, wanted)
    if not isinstance(param, DTensor):
        if dp_mesh.dims is not None:
            raise ConfigError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. "
                f"via distribute_module). Got plain tensor for parameter '{name}'."
            )
        spec = make_spec(dp_mesh.mesh, _data_placements(dp_mesh, Shard(dim)), param)
        return Placement(param.detach(), dim, spec, None, frozenset())
    unsharded_spec = param._spec
    local = param._local_tensor.detach().contiguous()
    if dp_mesh.dims is None:
        return Placement(local, dim, _beside_spec(unsharded_spec, dp_mesh, dim), unsharded_spec, frozenset())
    axes = check_replicated(name, unsharded_spec, dp_mesh)
    return Placement(local, dim, _spmd_spec(unsharded_spec, dp_mesh, dim), unsharded_spec, axes)


def local_gradient(grad: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The plain tensor in a gradient, shaped as `placement.local`.

    A DTensor's is brought to the parameter's placements first, which may take collectives; on the axes that
    fully_shard reduces it stays what it is.
    """
    if placement.unsharded_spec is None:
        return local_of(grad)
    if not isinstance(grad, DTensor):
        raise RefusedError(
            f"Expected DTensor, got {type(grad)} as the gradient of a DTensor parameter. A hook on it must "
            "return a DTensor too."
        )
    placements = placement.unsharded_spec.placements
    if len(placements) != len(grad.placements):
        raise RefusedError(
            f"Expected same placement length: {placements=} grad.placements={grad.placements}. The gradient "
            "is on another mesh than its parameter."
        )
    target = tuple(
        _keep(have) if axis in placement.data_parallel_axes else want
        for axis, (have, want) in enumerate(zip(grad.placements, placements, strict=True))
    )
    return comm.local_in(grad, target, feature=FEATURE)


def post_forward_spec(placement: Placement, mesh: DataParallelMesh) -> DTensorSpec:
    """The spec of the parameter between forward and backward, sharded over a smaller mesh."""
    if placement.unsharded_spec is not None:
        raise UnsupportedError(
            "Resharding to smaller mesh is not supported for DTensor parameters yet. Give "
            "reshard_after_forward a bool for modules that have such parameters."
        )
    meta = placement.sharded_spec.tensor_meta
    return DTensorSpec(mesh.mesh, _data_placements(mesh, Shard(placement.dim)), tensor_meta=meta)


def check_parameter(name: str, param: nn.Parameter, dp_mesh: DataParallelMesh) -> None:
    """Raise for a parameter that can't be sharded at all."""
    if param.ndim == 0:
        raise ConfigError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {name} to a 1D tensor with numel equal to 1."
        )
    if param.device != dp_mesh.device and param.device.type != "meta":
        raise RefusedError(
            f"Expects the parameter to already be moved to device {dp_mesh.device} but got {param.device} "
            f"for '{name}'."
        )
    if isinstance(param, DTensor) and dp_mesh.dims is None:
        _check_beside(name, param.device_mesh, dp_mesh.mesh)
    if not param.is_contiguous():
        raise UnsupportedError(
            f"FSDP does not support non-contiguous parameters yet: param.shape={param.shape} "
            f"param.stride()={param.stride()}. Make '{name}' contiguous before fully_shard: "
            "param.data = param.data.contiguous()."
        )


def _check_beside(name: str, have: DeviceMesh, data_mesh: DeviceMesh) -> None:
    """Raise for a parameter that is distributed over the ranks of the data-parallel mesh already."""
    ranks = sorted({*have.mesh.flatten().tolist()} & {*data_mesh.mesh.flatten().tolist()})
    if have == data_mesh or len(ranks) > 1:
        raise UnfitError(
            f"parameter '{name}' is a DTensor on ranks {ranks} already, which are to share it now. If "
            "fully_shard was applied to a module around this one: apply it to the inner modules first and to "
            "the outer one last, which leaves out what the inner ones have. If the parameter was distributed "
            "otherwise: do that over another axis of the mesh, or name the axes in dp_mesh_dims."
        )


def resolve_dim(name: str, param: torch.Tensor, wanted: Shard | None) -> int:
    """The dim to shard, counted from the front. Raises for one that the parameter doesn't have."""
    if wanted is None:
        return 0
    if not isinstance(wanted, Shard):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise RefusedError(
            f"Expected Shard, got {type(wanted)}: {wanted}. Invalid shard_placement_fn result: {wanted} for "
            f"'{name}'; return Shard(dim), or None for Shard(0)."
        )
    dim = wanted.dim + param.ndim if wanted.dim < 0 else wanted.dim
    if not 0 <= dim < param.ndim:
        raise RefusedError(
            f"Shard dim {wanted.dim} is invalid for {param.ndim}D tensor: {param.shape}. shard_placement_fn "
            f"must return a dim that '{name}' has."
        )
    return dim


def check_replicated(name: str, unsharded_spec: DTensorSpec, dp_mesh: DataParallelMesh) -> frozenset[int]:
    """The data-parallel axes of a DTensor parameter's mesh; raises unless it is replicated over them."""
    if unsharded_spec.mesh is not dp_mesh.spmd_mesh:
        raise ConfigError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different "
            f"mesh objects: '{name}' is on {unsharded_spec.mesh}, and fully_shard got {dp_mesh.spmd_mesh}. "
            "Make one, and use it for both."
        )
    axes: set[int] = set()
    for role, names in _axes_by_role(dp_mesh).items():
        for axis_name in names:
            axis = _axis_names(dp_mesh).index(axis_name)
            if not isinstance(unsharded_spec.placements[axis], Replicate):
                raise ConfigError(
                    f"Expected Replicate() on DP {role} dim '{axis_name}' (index {axis}) but got "
                    f"{unsharded_spec.placements[axis]}: '{name}' must be replicated over the axes that "
                    "share data."
                )
            axes.add(axis)
    return frozenset(axes)


def _axes_by_role(dp_mesh: DataParallelMesh) -> dict[str, tuple[str, ...]]:
    dims = dp_mesh.dims
    return {} if dims is None else {"shard": dims.shard_names, "replicate": dims.replicate_names}


def _axis_names(dp_mesh: DataParallelMesh) -> tuple[str, ...]:
    names = None if dp_mesh.spmd_mesh is None else dp_mesh.spmd_mesh.mesh_dim_names
    return names or ()


def _data_placements(dp_mesh: DataParallelMesh, placement: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """The placements on the mesh itself: (Replicate, placement), or the one of them that it has."""
    replicated = () if dp_mesh.replicate_group is None else (Replicate(),)
    return replicated if dp_mesh.shard_group is None else (*replicated, placement)


def _shard_along(dim: int, unsharded_spec: DTensorSpec, after: range) -> AxisPlacement:
    """How a shard along `dim` of what ranks hold reads to DTensor, which shards over axes on the left first.

    Axes of `after` come later in the mesh, and yet have sharded the tensor already.
    """
    sizes = (
        unsharded_spec.mesh.size(axis) for axis in after if _shards(unsharded_spec.placements[axis], dim)
    )
    num_before = math.prod(sizes)
    return _StridedShard(dim, split_factor=num_before) if num_before > 1 else Shard(dim)


def _shards(placement: AxisPlacement, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _beside_spec(unsharded_spec: DTensorSpec, dp_mesh: DataParallelMesh, dim: int) -> DTensorSpec:
    """Of a DTensor on other axes than the data-parallel mesh's: tensor or expert parallel."""
    placement = _shard_along(dim, unsharded_spec, range(len(unsharded_spec.placements)))
    placements = (*_data_placements(dp_mesh, placement), *unsharded_spec.placements)
    return DTensorSpec(
        dp_mesh.joined_with(unsharded_spec.mesh), placements, tensor_meta=unsharded_spec.tensor_meta
    )


def _spmd_spec(unsharded_spec: DTensorSpec, dp_mesh: DataParallelMesh, dim: int) -> DTensorSpec:
    """Of a DTensor on a mesh that has the data-parallel axes too."""
    names, roles = _axis_names(dp_mesh), _axes_by_role(dp_mesh)
    shard_axes = [names.index(name) for name in roles["shard"]]
    if not shard_axes:
        return unsharded_spec
    first = shard_axes[0]
    placement = _shard_along(dim, unsharded_spec, range(first + 1, len(names)))
    if len(shard_axes) == 1:
        placements = (*unsharded_spec.placements[:first], placement, *unsharded_spec.placements[first + 1 :])
        return DTensorSpec(unsharded_spec.mesh, placements, tensor_meta=unsharded_spec.tensor_meta)
    # Several axes act as one: what users see has that one, and the replicate axis beside it.
    left, right = dp_mesh.other_axes
    placements = (
        *(unsharded_spec.placements[axis] for axis in left),
        *_data_placements(dp_mesh, placement),
        *(unsharded_spec.placements[axis] for axis in right),
    )
    return DTensorSpec(dp_mesh.flattened_mesh, placements, tensor_meta=unsharded_spec.tensor_meta)


def _keep(placement: AxisPlacement) -> AxisPlacement:
    if isinstance(placement, Partial | Replicate):
        return placement
    raise RefusedError(
        f"a gradient came as {placement} along an axis that shares data, where each rank must have one of "
        "its own for the full parameter. Give the module inputs that are local, or Replicate() there."
    )
