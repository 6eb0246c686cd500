"""Collectives that give a new tensor, as a formula would: sums, gathers and exchanges of activations.

They are the door's own calls on memory that nobody else has. Where something of torch's watches each
operation (CommDebugMode, a tracer) they run as functional collectives, which is what such watchers know,
and pass the door all the same.

Private names of torch, used here and nowhere else: `torch._C._len_torch_dispatch_stack`,
`torch._C._get_dispatch_stack_at`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from weft.comm import collectives, traced
from weft.comm.door import launch_call
from weft.comm.group import resolve_group
from weft.comm.handle import Handle
from weft.comm.names import op_name

SUM = ReduceOp.SUM


def all_reduced(
    tensor: torch.Tensor,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_ours: bool = False,
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """The tensor reduced over all ranks. With `is_ours` its memory may be taken for the result."""
    if _is_watched():
        group = resolve_group(group)
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return _launch_functional(
            "all_reduce",
            group,
            feature,
            label,
            out,
            tensor,
            lambda: traced.reduced(tensor, op_name(op), group),
        )
    if not is_ours or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return collectives.all_reduce(tensor, op, group, feature=feature, label=label, is_waited=is_waited)


def all_gathered(
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """Every rank's tensor, one after the other along dim 0."""
    group = resolve_group(group)
    tensor = tensor.contiguous()
    out = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    if _is_watched():
        return _launch_functional(
            "all_gather_into_tensor",
            group,
            feature,
            label,
            out,
            tensor,
            lambda: traced.gathered(tensor, group),
        )
    return collectives.all_gather_into_tensor(
        out, tensor, group, feature=feature, label=label, is_waited=is_waited
    )


def reduce_scattered(
    tensor: torch.Tensor,
    op: Any = SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """This rank's part, along dim 0, of the tensor reduced over all ranks."""
    group = resolve_group(group)
    tensor = tensor.contiguous()
    out = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    if _is_watched():
        return _launch_functional(
            "reduce_scatter_tensor",
            group,
            feature,
            label,
            out,
            tensor,
            lambda: traced.scattered(tensor, op_name(op), group),
        )
    return collectives.reduce_scatter_tensor(
        out, tensor, op, group, feature=feature, label=label, is_waited=is_waited
    )


def exchanged(
    flat: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    label: str = "",
) -> Handle[torch.Tensor]:
    """What each rank gives this one, one after the other, of a flat tensor of which each rank gets a part."""
    group = resolve_group(group)
    out = flat.new_empty(sum(output_splits))
    if _is_watched():
        return _launch_functional(
            "all_to_all_single",
            group,
            feature,
            label,
            out,
            flat,
            lambda: traced.exchanged(flat, list(output_splits), list(input_splits), group),
        )
    return collectives.all_to_all_single(
        out, flat, output_splits, input_splits, group, feature=feature, label=label
    )


def done(result: torch.Tensor) -> Handle[torch.Tensor]:
    """A handle of what needed no collective."""
    if torch.compiler.is_compiling():
        return traced.TracedHandle(lambda: result)  # type: ignore[return-value]
    return Handle.done(result)


def _is_watched() -> bool:
    if torch.compiler.is_compiling():
        return True
    # A mode of weft's own (a plan's) hears of collectives at the group, where they are called in any run.
    return any(
        not hasattr(torch._C._get_dispatch_stack_at(at), "lets_collectives_pass")
        for at in range(torch._C._len_torch_dispatch_stack())
    )


def _launch_functional(
    op: str,
    group: ProcessGroup,
    feature: str,
    label: str,
    out: torch.Tensor,
    tensor: torch.Tensor,
    run: Callable[[], torch.Tensor],
) -> Handle[torch.Tensor]:
    if torch.compiler.is_compiling():
        return traced.TracedHandle(run)  # type: ignore[return-value]

    def start() -> None:
        out.copy_(run())

    return launch_call(op, group, feature, start, out, (tensor,), (out,), label=label)
