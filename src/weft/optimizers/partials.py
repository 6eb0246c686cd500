"""How tensors lie on their meshes, and the sums that Partial ones stand for.

A gradient of Partial placement is a term on each rank of an axis; the gradient is their sum. All terms of one
dtype are summed over an axis in one all-reduce. Which tensors are Partial must be the same on every rank of
the axis: nobody asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from weft import comm
from weft.errors import ConfigError
from weft.optimizers.norms import AxisRoles, plan_axes
from weft.tensors import copy_all, local_of, make_dtensor, make_spec


@dataclass(frozen=True, eq=False)
class MeshAxis:
    """An axis of a mesh. There is one for a group, which slices of one mesh share."""

    group: dist.ProcessGroup
    device_type: str  # where its group can reduce


class RoleReader:
    """What mesh axes do to tensors. For one call: it knows meshes by id."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[AxisRoles[MeshAxis], DeviceMesh]] = {}
        self._axes: dict[dist.ProcessGroup, MeshAxis] = {}

    def of(self, tensor: torch.Tensor) -> AxisRoles[MeshAxis]:
        """What the axes of its mesh do to the tensor. A plain one is whole."""
        if not isinstance(tensor, DTensor):
            return WHOLE
        # Read once for tensors that lie alike. Placements and meshes take longer to hash than all the rest
        # does for a small tensor, and the kinds of its placements say enough.
        spec = tensor._spec
        mesh, placements = spec.mesh, spec.placements
        key = (id(mesh), *map(type, placements))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (self._read(mesh, placements), mesh)
        return known[0]

    def _read(self, mesh: DeviceMesh, placements: Iterable[Placement]) -> AxisRoles[MeshAxis]:
        if mesh.get_coordinate() is None:
            raise ConfigError(
                f"clip_grad_norm_: rank {dist.get_rank()} is not on the mesh {mesh} of one of the tensors, "
                "so it can't learn its norm. Leave out what lies on other ranks only."
            )
        sharded: list[MeshAxis] = []
        partial: list[MeshAxis] = []
        for index, placement in enumerate(placements):
            if placement.is_replicate() or mesh.size(index) == 1:
                continue
            group = mesh.get_group(index)
            # torch has several kinds of shards: what is neither whole nor a term is one of them.
            kind = partial if placement.is_partial() else sharded
            kind.append(self._axes.setdefault(group, MeshAxis(group, mesh.device_type)))
        return AxisRoles(tuple(sharded), tuple(partial))


def settle_partials(owners: Sequence[torch.Tensor], reader: RoleReader) -> None:
    """Make gradients of Partial placement the sums, with Replicate placement, in their own memory."""
    grads = [cast("DTensor", owner.grad) for owner in owners]
    summed = sum_partials(grads, reader)
    copy_all([local_of(grad) for grad in grads], [summed[index] for index in range(len(grads))])
    for owner, grad in zip(owners, grads, strict=True):
        placements = [Replicate() if place.is_partial() else place for place in grad.placements]
        owner.grad = make_dtensor(local_of(grad), make_spec(grad.device_mesh, placements, grad))


def sum_partials(tensors: Sequence[torch.Tensor], reader: RoleReader) -> dict[int, torch.Tensor]:
    """What this rank holds of the sums of those of Partial placement, by index. New tensors."""
    partial = [reader.of(tensor).partial for tensor in tensors]
    for tensor, axes in zip(tensors, partial, strict=True):
        if axes:
            _check_is_linear(cast("DTensor", tensor).placements)
    summed: dict[int, torch.Tensor] = {}
    for plan in plan_axes(partial):
        terms = [summed.get(index, local_of(tensors[index])) for index in plan.indices]
        summed.update(zip(plan.indices, _sum_over(plan.axis, terms), strict=True))
    for index, total in summed.items():
        num_averaged = _num_averaged(cast("DTensor", tensors[index]))
        if num_averaged > 1:
            total.div_(num_averaged)
    return summed


def _sum_over(axis: MeshAxis, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    batches: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, term in enumerate(terms):
        batches.setdefault((term.dtype, term.device), []).append(place)
    launched: list[tuple[list[int], comm.Handle[torch.Tensor]]] = []
    for places in batches.values():
        flat = torch.cat([terms[place].reshape(-1) for place in places]).to(axis.device_type)
        launched.append((places, comm.all_reduce(flat, group=axis.group, feature="clip")))
    sums = list(terms)
    for places, handle in launched:
        parts = handle.wait().split([terms[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            sums[place] = part.view(terms[place].shape)
    return sums


WHOLE: AxisRoles[MeshAxis] = AxisRoles()


def _check_is_linear(placements: Iterable[Placement]) -> None:
    for placement in placements:
        is_sum = type(placement) is Partial and placement.reduce_op in ("sum", "avg")
        if placement.is_partial() and not is_sum:
            raise ConfigError(
                f"clip_grad_norm_: one of the gradients has the placement {placement!r}; those of "
                "Partial('sum') and Partial('avg') can be summed. Redistribute it first."
            )


def _num_averaged(tensor: DTensor) -> int:
    """Over how many ranks a mean is meant, where its terms were summed."""
    return math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )
