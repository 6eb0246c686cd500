"""Where a tensor enters or leaves a parallelized module: layouts change, and gradients change back.

The gradient of a tensor that a user sees has the layout's counterpart: of Replicate the whole gradient on
every rank, of Shard the chunk's, and of Partial the whole one, since each addend counts fully. DTensors carry
their layout with them, so their gradients may come, and be handed on, in any; a sum that isn't needed
here is left to whoever needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft import comm
from weft.autograd import traced_inside_only
from weft.comm import Handle
from weft.errors import ConfigError
from weft.tensor_parallel.axis import FEATURE, Axis
from weft.tensors import local_of, make_dtensor, shaped_spec

# Before torch 2.13 a traced function of autograd returns all that it has computed, not its result alone. What
# a collective brings is one tensor before and after the wait for it: of two that are the same, the last one
# returned gets the gradient, and the result none.
_RETURNS_ALL = torch.__version__ < "2.13"


@dataclass(frozen=True, eq=False)
class Crossing:
    """One tensor's way over the border of a module."""

    axis: Axis
    have: Placement  # how a plain tensor lies
    want: Placement | None  # how the result shall lie; None: as it does
    is_local: bool  # whether the result is a plain tensor
    where: str  # for errors
    grad: Placement | None = None  # how a plain result's gradient comes; None: as the counterpart
    whole_size: int | None = None  # along the dim of `have`, where it is known


@dataclass(frozen=True, eq=False)
class Opened:
    """What a rank holds of a tensor, and how it lies."""

    local: torch.Tensor
    layout: Placement
    whole_size: int | None  # along the dim of a Shard, where it is known
    is_plain: bool  # whether it came as a plain tensor


def counterpart(layout: Placement) -> Placement:
    """How the gradient of a tensor lies, by how the tensor does."""
    return Replicate() if isinstance(layout, Partial) else layout


def open_tensor(
    tensor: torch.Tensor, layout: Placement, axis: Axis, where: str, whole_size: int | None = None
) -> Opened:
    """Look into a tensor: a DTensor says how it lies, and a plain one is taken to lie in `layout`."""
    local = local_of(tensor)
    if not isinstance(tensor, DTensor):
        return Opened(local, counted(layout, local.ndim), whole_size, is_plain=True)
    if tensor.device_mesh is not axis.mesh and tensor.device_mesh != axis.mesh:
        raise ConfigError(
            f"{where}: got a DTensor on {tensor.device_mesh}, and the module is split over {axis.mesh}. Make "
            "both from one mesh, and redistribute or open (to_local) what lies on other axes."
        )
    found = counted(tensor.placements[0], local.ndim)
    comm.check_layout(found)
    return Opened(local, found, tensor.shape[found.dim] if isinstance(found, Shard) else None, is_plain=False)


def counted(layout: Placement, ndim: int) -> Placement:
    """The same layout, with its dim counted from the front."""
    return Shard(layout.dim + ndim) if isinstance(layout, Shard) and layout.dim < 0 else layout


def close_tensor(
    local: torch.Tensor, layout: Placement, whole_size: int | None, axis: Axis, *, is_local: bool
) -> torch.Tensor:
    """What users see of a tensor in this layout: the local one, or a DTensor."""
    if is_local:
        return local
    local = local.detach()  # a view of what needs a gradient needs one too
    shape = list(local.shape)
    if isinstance(layout, Shard) and whole_size is not None:
        shape[layout.dim] = whole_size
    return make_dtensor(local, shaped_spec(axis.mesh, (layout,), shape, local))


def launch(
    local: torch.Tensor,
    way: tuple[Placement, Placement],
    axis: Axis,
    whole_size: int | None,
    *,
    is_ours: bool = False,
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """Start what brings a local tensor from one layout to another."""
    return comm.launch_move(
        local,
        *way,
        axis.group,
        whole_size,
        feature=FEATURE,
        label=axis.label,
        is_ours=is_ours,
        is_waited=is_waited,
    )


def move(
    local: torch.Tensor,
    way: tuple[Placement, Placement],
    axis: Axis,
    whole_size: int | None,
    *,
    is_ours: bool = False,
) -> torch.Tensor:
    """A local tensor brought from one layout to another."""
    return launch(local, way, axis, whole_size, is_ours=is_ours, is_waited=True).wait()


def whole_size_of(
    local: torch.Tensor, layout: Placement, known: int | None, axis: Axis, where: str
) -> int | None:
    """The whole's size along the dim that it is cut along; asks the other ranks where nobody knows."""
    if known is not None or not isinstance(layout, Shard):
        return known
    return axis.whole_size(local.shape[layout.dim], layout.dim, where)


def as_result(local: torch.Tensor) -> torch.Tensor:
    """What an autograd function made, so that users may write to it: not as a view, which they couldn't."""
    # A graph has no views that could be written to.
    needs_own = _RETURNS_ALL if torch.compiler.is_compiling() else local._is_view()
    return torch.ops.aten._unsafe_view(local, local.shape) if needs_own else local


def cross(tensor: torch.Tensor, crossing: Crossing) -> torch.Tensor:
    """Bring a tensor over the border, where autograd will bring its gradient back."""
    if crossing.is_local and not isinstance(tensor, DTensor) and _changes_nothing(tensor.ndim, crossing):
        return tensor
    return _Cross.apply(tensor, crossing)  # type: ignore[no-any-return]


def _changes_nothing(ndim: int, crossing: Crossing) -> bool:
    """Whether a plain tensor comes out as it goes in, and its gradient too."""
    if crossing.axis.size == 1:
        return True
    is_same = crossing.want is None or counted(crossing.want, ndim) == counted(crossing.have, ndim)
    return is_same and crossing.grad is None and not isinstance(crossing.have, Partial)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        axis, where = crossing.axis, crossing.where
        opened = open_tensor(tensor, crossing.have, axis, where, crossing.whole_size)
        want = opened.layout if crossing.want is None else counted(crossing.want, opened.local.ndim)
        is_moved = want != opened.layout
        size = opened.whole_size
        if is_moved or not crossing.is_local:
            size = whole_size_of(opened.local, opened.layout, size, axis, where)
        moved = move(opened.local, (opened.layout, want), axis, size)
        result_size = opened.local.shape[want.dim] if is_moved and isinstance(want, Shard) else size
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        ctx.grad_layout = counterpart(want) if crossing.grad is None else crossing.grad
        ctx.grad_size = result_size
        # A DTensor that wasn't moved takes its gradient as it comes.
        ctx.target = counterpart(opened.layout) if opened.is_plain or is_moved else None
        ctx.is_plain, ctx.is_addend = opened.is_plain, isinstance(opened.layout, Partial)
        # Autograd writes on what is returned; what wasn't moved is another's.
        moved = moved.view_as(moved) if moved is opened.local else as_result(moved)
        return close_tensor(moved, want, result_size, axis, is_local=crossing.is_local)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (grad,) = grads
        if grad is None:
            return None, None
        back = Crossing(
            ctx.crossing.axis,
            have=ctx.grad_layout,
            want=ctx.target,
            is_local=ctx.is_plain,
            where=f"gradient of {ctx.crossing.where}",
            # What comes back to an addend is whole, and used by each rank for its own: its gradient is a sum.
            grad=Partial() if ctx.is_addend else None,
            whole_size=ctx.grad_size,
        )
        return cross(grad, back), None
