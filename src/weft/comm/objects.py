"""Collectives of Python objects, through the door.

Objects are pickled: only ranks that trust each other may exchange them. They are
waited for inside the call, since their sizes must travel first; the Handle is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.door import launch_call
from weft.comm.group import resolve_group, state_of
from weft.comm.handle import Handle


def all_gather_object(
    value: Any, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[Any]]:
    """Every rank's object, by rank."""
    group = resolve_group(group)
    found: list[Any] = [None] * len(state_of(group).ranks)
    return launch_call(
        "all_gather_object",
        group,
        feature,
        lambda: dist.all_gather_object(found, value, group),
        found,
        (),
        (),
    )


def gather_object(
    value: Any, dst: int, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[Any] | None]:
    """Every rank's object, by rank, on rank `dst`; None elsewhere."""
    group = resolve_group(group)
    state = state_of(group)
    found: list[Any] | None = [None] * len(state.ranks) if state.global_rank == dst else None
    return launch_call(
        "gather_object",
        group,
        feature,
        lambda: dist.gather_object(value, found, dst, group),
        found,
        (),
        (),
        f"root {dst}",
    )


def broadcast_object_list(
    values: Sequence[Any], src: int, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[list[Any]]:
    """Rank `src`'s objects. The others give a list of the same length."""
    group = resolve_group(group)
    found = list(values)
    return launch_call(
        "broadcast_object_list",
        group,
        feature,
        lambda: dist.broadcast_object_list(found, src, group),
        found,
        (),
        (),
        f"{len(found)} objects, root {src}",
    )


def scatter_object_list(
    values: Sequence[Any] | None, src: int, group: ProcessGroup | None = None, *, feature: str = "user"
) -> Handle[Any]:
    """This rank's object of rank `src`'s list; the others give None for the list."""
    group = resolve_group(group)
    found: list[Any] = [None]
    given = None if values is None else list(values)
    handle: Handle[list[Any]] = launch_call(
        "scatter_object_list",
        group,
        feature,
        lambda: dist.scatter_object_list(found, given, src, group),
        found,
        (),
        (),
        f"root {src}",
    )
    return handle.then(lambda only: only[0])
