"""Messages between two ranks, through the door: send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.door import launch_call
from weft.comm.group import resolve_group
from weft.comm.handle import Handle
from weft.errors import ConfigError

Message = tuple[Literal["send", "recv"], torch.Tensor, int]


def send(
    tensor: torch.Tensor,
    dst: int,
    group: ProcessGroup | None = None,
    tag: int = 0,
    *,
    feature: str = "user",
) -> Handle[torch.Tensor]:
    """Send a tensor to rank `dst` of the world."""
    group = resolve_group(group)
    return launch_call(
        "send",
        group,
        feature,
        lambda: dist.isend(tensor, dst, group, tag),
        tensor,
        (tensor,),
        (),
        f"to rank {dst}, tag {tag}",
        is_collective=False,
    )


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    *,
    feature: str = "user",
) -> Handle[torch.Tensor]:
    """Receive a tensor from rank `src` of the world, or from anyone."""
    group = resolve_group(group)
    return launch_call(
        "recv",
        group,
        feature,
        lambda: dist.irecv(tensor, src, group, tag),
        tensor,
        (),
        (tensor,),
        f"from {'anyone' if src is None else f'rank {src}'}, tag {tag}",
        is_collective=False,
    )


def exchange(
    messages: Sequence[Message], group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[torch.Tensor]]:
    """Start several sends and receives at once, which none can block: ("send", tensor, rank), ...

    The handle's result are the received tensors, in order.
    """
    group = resolve_group(group)
    for kind, _, _ in messages:
        if kind not in ("send", "recv"):
            raise ConfigError(f"exchange: a message is ('send' or 'recv', tensor, rank), got {kind!r}.")
    ops: list[Any] = [
        dist.P2POp(dist.isend if kind == "send" else dist.irecv, tensor, peer, group)
        for kind, tensor, peer in messages
    ]
    received = [tensor for kind, tensor, _ in messages if kind == "recv"]
    return launch_call(
        "exchange",
        group,
        feature,
        lambda: dist.batch_isend_irecv(ops),
        received,
        [tensor for kind, tensor, _ in messages if kind == "send"],
        received,
        is_collective=False,
    )
