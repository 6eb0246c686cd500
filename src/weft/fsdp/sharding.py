"""Cut one parameter: from the user's whole one to this rank's piece, a DTensor in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from weft.fsdp.choose import Site
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam
from weft.fsdp.placement import Placement, place
from weft.fsdp.split import Split
from weft.tensors import make_parameter


@torch.no_grad()
def shard_parameter(
    name: str,
    param: nn.Parameter,
    sites: Sequence[Site],
    data: DataMesh,
    placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    device: torch.device,
    *,
    is_pinned: bool,
) -> ShardedParam:
    """Put a sharded parameter in the place of a whole one, wherever that is registered."""
    placement = place(name, param, data, None if placement_fn is None else placement_fn(param))
    local = _piece(placement, data)
    if not local.is_meta:
        local = local.to(device)
        local = local.pin_memory() if is_pinned else local
    sharded = make_parameter(local, placement.sharded_spec, requires_grad=param.requires_grad)
    _move_hooks(param, sharded)
    shape = torch.empty(placement.local.shape, dtype=placement.local.dtype, device="meta")
    placement = dataclasses.replace(placement, local=shape)  # the whole parameter may go
    made = ShardedParam(name, sites, placement, data, sharded)
    made.origin = _origin(param)
    made.show_sharded()
    return made


def _piece(placement: Placement, data: DataMesh) -> torch.Tensor:
    whole = placement.local
    if data.shard_size == 1:
        return whole
    split = Split(tuple(whole.shape), placement.dim, data.shard_size)
    start, length = split.span(data.shard_rank)
    if not hasattr(whole, "fsdp_pre_all_gather"):
        return whole.narrow(split.dim, start, length).clone(memory_format=torch.contiguous_format)
    # A tensor class of the user's: only the operations that torch asks of it, and room for a full piece.
    pieces = torch.chunk(whole, data.shard_size, dim=split.dim)
    room = whole.new_zeros(pieces[0].size())
    if length:
        room.narrow(split.dim, 0, length).copy_(pieces[data.shard_rank])
    return room.narrow(split.dim, 0, length)


def _move_hooks(param: nn.Parameter, sharded: nn.Parameter) -> None:
    """Hooks that the user registered before live on: they get the sharded gradient."""
    before: Any = param
    for hook in (before._backward_hooks or {}).values():
        if sharded.requires_grad:
            sharded.register_hook(hook)
    for hook in (before._post_accumulate_grad_hooks or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)


def _origin(param: nn.Parameter) -> object:
    """What tells that two sharded parameters were one: the same object for both, as long as one of them
    lives.
    """
    if not hasattr(param, "_weft_origin"):
        param._weft_origin = object()  # type: ignore[attr-defined]
    return param._weft_origin  # type: ignore[attr-defined]
