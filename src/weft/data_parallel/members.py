"""A parameter that is reduced, and how its gradient is read and set: as it is, or inside a DTensor.

Of a DTensor parameter (tensor parallel, on another axis of the mesh) each rank holds a local tensor, and the
ranks of a data-parallel group hold the same piece of it. So specs, buckets and messages are about local
tensors, and a plain parameter is its own local tensor. Users see DTensors: `.grad` has the parameter's
placements. A gradient that came in others is settled before it goes to its bucket: a sum over the
parameter's own mesh, say, where SequenceParallel left each rank with its own part (Partial).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.plan import ParamSpec, param_spec
from weft.errors import InternalError, StateError, UnfitError
from weft.tensors import local_of, make_dtensor, make_spec, with_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter and how to tell the user of it."""

    param: torch.Tensor
    spec: ParamSpec  # of its local tensor
    whole: DTensorSpec | None = None  # how a DTensor parameter lies on its mesh, and so its gradient

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """A gradient as users see it, around a tensor of the spec's shape."""
        return local if self.whole is None else make_dtensor(local, with_dtype(self.whole, local.dtype))


def make_member(name: str, param: torch.Tensor, *, is_sparse: bool, is_delayed: bool) -> Member:
    """A parameter under the name that it has in the module. Raises for one that can't be reduced."""
    local = local_of(param)
    if not isinstance(param, DTensor):
        return Member(param, param_spec(name, local, is_sparse=is_sparse, is_delayed=is_delayed))
    if is_sparse:
        raise UnfitError(
            f"parameter '{name}' is a DTensor, and its module makes sparse gradients, which DTensors can't "
            "have. Make the embedding with sparse=False, or leave it out of tensor parallel."
        )
    place = param.device_mesh.get_coordinate()
    piece = f"piece {place} of {list(param.shape)} by {param.placements}"
    spec = param_spec(name, local, is_delayed=is_delayed, piece=piece)
    return Member(param, spec, make_spec(param.device_mesh, param.placements, param))


def check_apart(params: Iterable[tuple[str, torch.Tensor]], group: ProcessGroup) -> None:
    """Raise for a DTensor whose pieces lie on several ranks of the group: those have no mean."""
    ranks = state_of(group).ranks
    for name, param in params:
        if not isinstance(param, DTensor):
            continue
        holders: list[int] = param.device_mesh.mesh.flatten().tolist()
        if len({*ranks} & {*holders}) > 1:
            raise UnfitError(
                f"parameter '{name}' is a DTensor on ranks {holders} ({param.placements}), and the "
                f"data-parallel group has ranks {list(ranks)}: they must have one rank in common. If "
                "fully_shard made it, that reduces its gradient, too: leave DistributedDataParallel or "
                "replicate out. Else distribute it over one axis of a mesh, mesh['tp'] say, and pass another "
                "as device_mesh=mesh['dp']; or leave its module to others with `ignored_modules` (replicate)."
            )


def local_grads(members: Iterable[Member]) -> list[torch.Tensor | None]:
    """What is inside of their gradients, which must be settled."""
    locals_: list[torch.Tensor | None] = []
    for member in members:
        grad = member.param.grad
        if member.whole is not None and not is_settled(member.param):
            raise InternalError(f"the gradient of '{member.spec.name}' was to be sent before it was settled")
        locals_.append(None if grad is None else local_of(grad))
    return locals_


def is_settled(param: torch.Tensor) -> bool:
    """Whether a DTensor parameter's gradient, if there is one, lies as the parameter does."""
    grad = param.grad
    return grad is None or getattr(grad, "placements", None) == param.placements  # type: ignore[attr-defined]


def settle(placed: Mapping[int, Member], params: Iterable[torch.Tensor]) -> None:
    """Bring gradients of DTensor parameters to their parameters' placements.

    `placed` has the members with DTensors by their parameters' ids. All ranks of their meshes must do so, in
    the same order. What came stays as it is: its memory may be another gradient's too.
    """
    for param in params if placed else ():
        member = placed.get(id(param))
        if member is not None and not is_settled(param):
            _settle(member)


def _settle(member: Member) -> None:
    param, whole = member.param, member.whole
    if whole is None:
        raise InternalError(f"parameter '{member.spec.name}' is no DTensor")
    grad = param.grad
    if not isinstance(grad, DTensor) or grad.device_mesh != whole.mesh:
        where = f" on {grad.device_mesh}" if isinstance(grad, DTensor) else ""
        raise StateError(
            f"parameter '{member.spec.name}' is a DTensor on {whole.mesh}, and its gradient came as a "
            f"{type(grad).__name__}{where}. A hook on it must return a DTensor on the parameter's own mesh."
        )
    with torch.no_grad():
        param.grad = member.shown(comm.local_in(grad, whole.placements, feature=FEATURE))
