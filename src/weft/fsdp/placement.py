"""How one parameter lies on the mesh: what is split, along which dim, and the DTensor that users see of it.

Invariant: fully_shard splits what a rank holds already. On a DTensor's own axes nothing moves, so that its
shard is split last, wherever the data-parallel axis stands in the mesh.
How many elements each rank gets is the layout's to say; nothing is allocated or sent here, but where a
DTensor gradient has to be brought to its parameter's placements.

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
from weft.fsdp.mesh import DataMesh
from weft.tensors import local_of, make_spec


@dataclass(frozen=True, eq=False)
class Placement:
    """How one parameter is split: which tensor, along which dim, and what users see of it."""

    local: (
        torch.Tensor
    )  # what is split: the parameter's data, or a DTensor parameter's local tensor; detached
    dim: int  # the dim of `local` that is split
    sharded_spec: DTensorSpec  # of the sharded parameter
    whole_spec: DTensorSpec | None  # of the unsharded parameter where that is a DTensor
    kept_dims: frozenset[int]  # axes of whole_spec's mesh whose sums fully_shard makes itself


def place(name: str, param: nn.Parameter, data: DataMesh, wanted: Shard | None) -> Placement:
    """Decide how a parameter is split over `data`: along the wanted dim, or the first.

    Raises ConfigError, RefusedError or UnsupportedError, naming the parameter, where it can't be.
    """
    check_parameter(name, param, data)
    dim = resolve_dim(name, param, wanted)
    if not isinstance(param, DTensor):
        if data.dims is not None:
            raise ConfigError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. "
                f"via distribute_module). Got plain tensor for parameter '{name}'."
            )
        spec = make_spec(data.mesh, _data_placements(data, Shard(dim)), param)
        return Placement(param.detach(), dim, spec, None, frozenset())
    whole = param._spec
    local = param._local_tensor.detach().contiguous()
    if data.dims is None:
        return Placement(local, dim, _beside_spec(whole, data, dim), whole, frozenset())
    kept = check_replicated(name, whole, data)
    return Placement(local, dim, _spmd_spec(whole, data, dim), whole, kept)


def local_gradient(grad: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The plain tensor in a gradient, shaped as `placement.local`.

    A DTensor's is brought to the parameter's placements first, which may take collectives; on the axes that
    fully_shard reduces it stays what it is.
    """
    if placement.whole_spec is None:
        return local_of(grad)
    if not isinstance(grad, DTensor):
        raise RefusedError(
            f"Expected DTensor, got {type(grad)} as the gradient of a DTensor parameter. A hook on it must "
            "return a DTensor too."
        )
    placements = placement.whole_spec.placements
    if len(placements) != len(grad.placements):
        raise RefusedError(
            f"Expected same placement length: {placements=} grad.placements={grad.placements}. The gradient "
            "is on another mesh than its parameter."
        )
    target = tuple(
        _keep(have) if axis in placement.kept_dims else want
        for axis, (have, want) in enumerate(zip(grad.placements, placements, strict=True))
    )
    return comm.local_in(grad, target, feature="fsdp")


def smaller_spec(placement: Placement, smaller: DataMesh) -> DTensorSpec:
    """What is registered after forward where parameters are resharded to a smaller mesh."""
    if placement.whole_spec is not None:
        raise UnsupportedError(
            "Resharding to smaller mesh is not supported for DTensor parameters yet. Give "
            "reshard_after_forward a bool for modules that have such parameters."
        )
    meta = placement.sharded_spec.tensor_meta
    return DTensorSpec(smaller.mesh, _data_placements(smaller, Shard(placement.dim)), tensor_meta=meta)


def check_parameter(name: str, param: nn.Parameter, data: DataMesh) -> None:
    """Raise for a parameter that can't be split at all."""
    if param.ndim == 0:
        raise ConfigError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {name} to a 1D tensor with numel equal to 1."
        )
    if param.device != data.device and param.device.type != "meta":
        raise RefusedError(
            f"Expects the parameter to already be moved to device {data.device} but got {param.device} for "
            f"'{name}'."
        )
    if isinstance(param, DTensor) and data.dims is None:
        _check_beside(name, param.device_mesh, data.mesh)
    if not param.is_contiguous():
        raise UnsupportedError(
            f"FSDP does not support non-contiguous parameters yet: param.shape={param.shape} "
            f"param.stride()={param.stride()}. Make '{name}' contiguous before fully_shard: "
            "param.data = param.data.contiguous()."
        )


def _check_beside(name: str, have: DeviceMesh, data_mesh: DeviceMesh) -> None:
    """Raise for a parameter that is distributed over the ranks of the data mesh already."""
    ranks = sorted({*have.mesh.flatten().tolist()} & {*data_mesh.mesh.flatten().tolist()})
    if have == data_mesh or len(ranks) > 1:
        raise UnfitError(
            f"parameter '{name}' is a DTensor on ranks {ranks} already, which are to share it now. If "
            "fully_shard was applied to a module around this one: apply it to the inner modules first and to "
            "the outer one last, which leaves out what the inner ones have. If the parameter was distributed "
            "otherwise: do that over another axis of the mesh, or name the axes in dp_mesh_dims."
        )


def resolve_dim(name: str, param: torch.Tensor, wanted: Shard | None) -> int:
    """The dim to split, counted from the front. Raises for one that the parameter doesn't have."""
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


def check_replicated(name: str, whole: DTensorSpec, data: DataMesh) -> frozenset[int]:
    """The data-parallel axes of a DTensor parameter's mesh; raises unless it is whole along them."""
    if whole.mesh is not data.spmd_mesh:
        raise ConfigError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different "
            f"mesh objects: '{name}' is on {whole.mesh}, and fully_shard got {data.spmd_mesh}. Make one, and "
            "use it for both."
        )
    axes: set[int] = set()
    for role, names in _axes_by_role(data).items():
        for axis_name in names:
            axis = _axis_names(data).index(axis_name)
            if not isinstance(whole.placements[axis], Replicate):
                raise ConfigError(
                    f"Expected Replicate() on DP {role} dim '{axis_name}' (index {axis}) but got "
                    f"{whole.placements[axis]}: '{name}' must be whole along the axes that share data."
                )
            axes.add(axis)
    return frozenset(axes)


def _axes_by_role(data: DataMesh) -> dict[str, tuple[str, ...]]:
    dims = data.dims
    return {} if dims is None else {"shard": dims.shard_names, "replicate": dims.replicate_names}


def _axis_names(data: DataMesh) -> tuple[str, ...]:
    names = None if data.spmd_mesh is None else data.spmd_mesh.mesh_dim_names
    return names or ()


def _data_placements(data: DataMesh, split: AxisPlacement) -> tuple[AxisPlacement, ...]:
    """The placements on the data mesh itself: (Replicate, split), or the one of them that it has."""
    replicated = () if data.replicate_group is None else (Replicate(),)
    return replicated if data.shard_group is None else (*replicated, split)


def _split(dim: int, whole: DTensorSpec, after: range) -> AxisPlacement:
    """The split of what ranks hold along `dim`, told to DTensor, for which axes on the left split first.

    Axes of `after` come later in the mesh and yet have split the tensor already.
    """
    sizes = (whole.mesh.size(axis) for axis in after if _splits(whole.placements[axis], dim))
    num_before = math.prod(sizes)
    return _StridedShard(dim, split_factor=num_before) if num_before > 1 else Shard(dim)


def _splits(placement: AxisPlacement, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _beside_spec(whole: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Of a DTensor on other axes than the data mesh's: tensor or expert parallel."""
    split = _split(dim, whole, range(len(whole.placements)))
    placements = (*_data_placements(data, split), *whole.placements)
    return DTensorSpec(data.joined_with(whole.mesh), placements, tensor_meta=whole.tensor_meta)


def _spmd_spec(whole: DTensorSpec, data: DataMesh, dim: int) -> DTensorSpec:
    """Of a DTensor on a mesh that has the data-parallel axes too."""
    names, roles = _axis_names(data), _axes_by_role(data)
    shard_axes = [names.index(name) for name in roles["shard"]]
    if not shard_axes:
        return whole
    first = shard_axes[0]
    split = _split(dim, whole, range(first + 1, len(names)))
    if len(shard_axes) == 1:
        placements = (*whole.placements[:first], split, *whole.placements[first + 1 :])
        return DTensorSpec(whole.mesh, placements, tensor_meta=whole.tensor_meta)
    # Several axes act as one: what users see has that one, and the replicate axis beside it.
    left, right = data.other_axes
    placements = (
        *(whole.placements[axis] for axis in left),
        *_data_placements(data, split),
        *(whole.placements[axis] for axis in right),
    )
    return DTensorSpec(data.flattened_mesh, placements, tensor_meta=whole.tensor_meta)


def _keep(placement: AxisPlacement) -> AxisPlacement:
    if isinstance(placement, Partial | Replicate):
        return placement
    raise RefusedError(
        f"a gradient came as {placement} along an axis that shares data, where each rank must have one of "
        "its own for the whole parameter. Give the module inputs that are local, or Replicate() there."
    )
