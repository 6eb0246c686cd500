"""The one door: every collective of weft, and of users who like, passes here.

Each function starts a collective and returns a Handle at once. `group` is the whole
world unless given, roots are ranks of the world as in torch.distributed, `feature`
says who calls and `label` what it is about, for records. torch.distributed's functions
are looked up when they are called, so whoever replaces them is heard. `is_waited` says
that the caller does nothing before it waits: the call is done when it returns, which
spares a handover between threads.

Messages (messages.py) and objects (objects.py) pass the same way, through
`launch_call` of door.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from weft.comm import traced
from weft.comm.door import launch_call
from weft.comm.group import resolve_group, state_of
from weft.comm.handle import Handle
from weft.comm.names import all_gather_single, op_name, reduce_scatter_single
from weft.comm.sparse import needs_gathering, sum_by_gathering

Tensors = Sequence[torch.Tensor]
is_compiling = torch.compiler.is_compiling
SUM = ReduceOp.SUM


def all_reduce(
    tensor: torch.Tensor,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """Reduce the tensor over all ranks, in place."""
    group = resolve_group(group)
    if is_compiling():
        return traced.all_reduce(tensor, op_name(op), group)  # type: ignore[return-value]
    if tensor.is_sparse and op == SUM and needs_gathering(tensor, group):
        return sum_by_gathering(
            tensor,
            group.size(),
            lambda out, mine: all_gather_into_tensor(out, mine, group, feature=feature, label=label),
        )
    return launch_call(
        "all_reduce",
        group,
        feature,
        lambda: dist.all_reduce(tensor, op, group, async_op=not is_waited),
        tensor,
        (tensor,),
        (tensor,),
        op_name(op),
        label=label,
    )


def all_reduce_coalesced(
    tensors: Tensors,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[list[torch.Tensor]]:
    """Reduce several tensors over all ranks, in place, as one call."""
    group = resolve_group(group)
    given = list(tensors)
    if is_compiling():
        return traced.all_reduce_coalesced(given, op_name(op), group)  # type: ignore[return-value]
    return launch_call(
        "all_reduce_coalesced",
        group,
        feature,
        lambda: [dist.all_reduce(tensor, op, group, async_op=True) for tensor in given],
        given,
        given,
        given,
        op_name(op),
        label=label,
    )


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
) -> Handle[torch.Tensor]:
    """Reduce the tensor over all ranks into rank `dst`'s."""
    group = resolve_group(group)
    is_root = state_of(group).global_rank == dst
    return launch_call(
        "reduce",
        group,
        feature,
        lambda: dist.reduce(tensor, dst, op, group, async_op=True),
        tensor,
        (tensor,),
        (tensor,) if is_root else (),
        f"{op_name(op)}, root {dst}",
    )


def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[torch.Tensor]:
    """Copy rank `src`'s tensor to every rank."""
    group = resolve_group(group)
    if is_compiling():
        return traced.broadcast(tensor, dist.get_group_rank(group, src), group)  # type: ignore[return-value]
    is_root = state_of(group).global_rank == src
    return launch_call(
        "broadcast",
        group,
        feature,
        lambda: dist.broadcast(tensor, src, group, async_op=True),
        tensor,
        (tensor,) if is_root else (),
        () if is_root else (tensor,),
        f"root {src}",
        label=label,
    )


def all_gather(
    outs: Tensors, tensor: torch.Tensor, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[torch.Tensor]]:
    """Copy every rank's tensor into a list on every rank."""
    group = resolve_group(group)
    filled = list(outs)
    return launch_call(
        "all_gather",
        group,
        feature,
        lambda: dist.all_gather(filled, tensor, group, async_op=True),
        filled,
        (tensor,),
        filled,
    )


def all_gather_into_tensor(
    out: torch.Tensor,
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """Copy every rank's tensor into one tensor on every rank, along dim 0."""
    group = resolve_group(group)
    if is_compiling():
        return traced.all_gather_into_tensor(out, tensor, group)  # type: ignore[return-value]
    return launch_call(
        "all_gather_into_tensor",
        group,
        feature,
        lambda: all_gather_single(out, tensor, group, is_waited=is_waited),
        out,
        (tensor,),
        (out,),
        label=label,
    )


def all_gather_into_tensor_coalesced(
    outs: Tensors,
    tensors: Tensors,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[list[torch.Tensor]]:
    """Several all_gather_into_tensor as one call."""
    group = resolve_group(group)
    if is_compiling():
        return traced.all_gather_into_tensor_coalesced(outs, tensors, group)  # type: ignore[return-value]
    pairs = list(zip(outs, tensors, strict=True))
    return launch_call(
        "all_gather_into_tensor_coalesced",
        group,
        feature,
        lambda: [all_gather_single(out, tensor, group) for out, tensor in pairs],
        list(outs),
        list(tensors),
        list(outs),
        label=label,
    )


def gather(
    tensor: torch.Tensor,
    outs: Tensors | None,
    dst: int,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
) -> Handle[list[torch.Tensor] | None]:
    """Copy every rank's tensor into a list on rank `dst`; the others give None for it."""
    group = resolve_group(group)
    filled = None if outs is None else list(outs)
    return launch_call(
        "gather",
        group,
        feature,
        lambda: dist.gather(tensor, filled, dst, group, async_op=True),
        filled,
        (tensor,),
        filled or (),
        f"root {dst}",
    )


def scatter(
    tensor: torch.Tensor,
    parts: Tensors | None,
    src: int,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
) -> Handle[torch.Tensor]:
    """Copy rank `src`'s tensors, one to each rank; the others give None for them."""
    group = resolve_group(group)
    given = None if parts is None else list(parts)
    return launch_call(
        "scatter",
        group,
        feature,
        lambda: dist.scatter(tensor, given, src, group, async_op=True),
        tensor,
        given or (),
        (tensor,),
        f"root {src}",
    )


def reduce_scatter(
    out: torch.Tensor,
    parts: Tensors,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
) -> Handle[torch.Tensor]:
    """Reduce a list of tensors, one a rank; keep this rank's."""
    group = resolve_group(group)
    given = list(parts)
    return launch_call(
        "reduce_scatter",
        group,
        feature,
        lambda: dist.reduce_scatter(out, given, op, group, async_op=True),
        out,
        given,
        (out,),
        op_name(op),
    )


def reduce_scatter_tensor(
    out: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """Reduce a tensor over all ranks and keep this rank's part of dim 0."""
    group = resolve_group(group)
    if is_compiling():
        return traced.reduce_scatter_tensor(out, tensor, op_name(op), group)  # type: ignore[return-value]
    return launch_call(
        "reduce_scatter_tensor",
        group,
        feature,
        lambda: reduce_scatter_single(out, tensor, op, group, is_waited=is_waited),
        out,
        (tensor,),
        (out,),
        op_name(op),
        label=label,
    )


def reduce_scatter_tensor_coalesced(
    outs: Tensors,
    tensors: Tensors,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[list[torch.Tensor]]:
    """Several reduce_scatter_tensor as one call."""
    group = resolve_group(group)
    if is_compiling():
        return traced.reduce_scatter_tensor_coalesced(  # type: ignore[return-value]
            outs, tensors, op_name(op), group
        )
    pairs = list(zip(outs, tensors, strict=True))
    return launch_call(
        "reduce_scatter_tensor_coalesced",
        group,
        feature,
        lambda: [reduce_scatter_single(out, tensor, op, group) for out, tensor in pairs],
        list(outs),
        list(tensors),
        list(outs),
        op_name(op),
        label=label,
    )


def all_to_all(
    outs: Tensors, tensors: Tensors, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[torch.Tensor]]:
    """Give the i-th tensor to rank i; get one from each rank."""
    group = resolve_group(group)
    filled, given = list(outs), list(tensors)
    return launch_call(
        "all_to_all",
        group,
        feature,
        lambda: dist.all_to_all(filled, given, group, async_op=True),
        filled,
        given,
        filled,
    )


def all_to_all_single(
    out: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[torch.Tensor]:
    """Give the i-th part of a tensor (along dim 0) to rank i; get one from each rank."""
    group = resolve_group(group)
    if is_compiling():
        return traced.all_to_all_single(  # type: ignore[return-value]
            out, tensor, output_split_sizes, input_split_sizes, group
        )
    outs = None if output_split_sizes is None else list(output_split_sizes)
    ins = None if input_split_sizes is None else list(input_split_sizes)
    return launch_call(
        "all_to_all_single",
        group,
        feature,
        lambda: dist.all_to_all_single(out, tensor, outs, ins, group, async_op=True),
        out,
        (tensor,),
        (out,),
        label=label,
    )


def barrier(group: ProcessGroup | None = None, *, feature: str = "user") -> Handle[None]:
    """Wait for every rank: done when all of them have called it."""
    group = resolve_group(group)
    return launch_call("barrier", group, feature, lambda: dist.barrier(group, async_op=True), None, (), ())
