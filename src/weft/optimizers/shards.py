"""The parameters of each owner, packed flat, and how owners give them to everybody.

One flat buffer for each owner, dtype and device, so that a step takes a few broadcasts
however many parameters there are. With `keeps_views` the parameters lie in the buffers
for good, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup, get_global_rank

from weft import comm
from weft.tensors import copy_all, dense_strides, view_in


@dataclass(frozen=True, slots=True)
class OwnedFlat:
    """Some parameters of one owner, and the buffer that carries them."""

    owner: int  # a rank of the group
    params: list[torch.Tensor]
    flat: torch.Tensor  # 1D
    views: list[torch.Tensor]  # into it, one a parameter
    keeps_views: bool


def pack_params(
    params: Sequence[torch.Tensor], owners: Sequence[int], group: ProcessGroup, *, keeps_views: bool
) -> list[OwnedFlat]:
    """Pack parameters by owner, dtype and device, in the order in which they come."""
    packs: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param, owner in zip(params, owners, strict=True):
        packs.setdefault((owner, param.dtype, param.device), []).append(param)
    return [
        _pack(owner, packed, group, keeps_views=keeps_views)
        for (owner, _, _), packed in sorted(packs.items(), key=lambda item: item[0][0])
    ]


def _pack(owner: int, params: list[torch.Tensor], group: ProcessGroup, *, keeps_views: bool) -> OwnedFlat:
    numels = [param.numel() for param in params]
    flat = comm.allocate((sum(numels),), params[0].dtype, params[0].device, group)
    views: list[torch.Tensor] = []
    offset = 0
    for param, numel in zip(params, numels, strict=True):
        views.append(view_in(flat, offset, param.shape, dense_strides(param.shape, param.stride())))
        offset += numel
    if keeps_views:
        with torch.no_grad():
            copy_all(views, [param.detach() for param in params])
            for param, view in zip(params, views, strict=True):
                param.data = view
    return OwnedFlat(owner, params, flat, views, keeps_views)


def launch_share(packed: OwnedFlat, group: ProcessGroup, feature: str) -> comm.Handle[torch.Tensor]:
    """Start giving the owner's parameters to all ranks; waiting for the handle puts them in place."""
    is_owner = group.rank() == packed.owner
    if is_owner and not packed.keeps_views:
        with torch.no_grad():
            copy_all(packed.views, [param.detach() for param in packed.params])
    handle = comm.broadcast(packed.flat, get_global_rank(group, packed.owner), group, feature=feature)
    if is_owner or packed.keeps_views:
        return handle

    def unpack(flat: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            copy_all([param.detach() for param in packed.params], packed.views)
        return flat

    return handle.then(unpack)
