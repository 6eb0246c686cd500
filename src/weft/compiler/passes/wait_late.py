"""Waits go down to where their results are used.

Before: all_reduce, wait, views, then the rest of the backward
After:  all_reduce, the rest of the backward, wait, views

What is in between runs while the collective does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, places

aten: Any = torch.ops.aten
# What may go down together with a wait: views, and casts of what has come.
UNPACKING: frozenset[Any] = frozenset(
    {
        WAIT,
        aten.permute.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.view.default,
        aten.split_with_sizes.default,
        torch.ops.prims.convert_element_type.default,
        operator.getitem,
    }
)


def wait_late(graph: fx.Graph, launches: list[fx.Node]) -> None:
    """Move what follows these launches down to its first use."""
    moving = _unpacking_of(launches)
    place = places(graph)
    for node in sorted(moving, key=place.__getitem__, reverse=True):
        if node.users:
            at = places(graph) if node.target is WAIT else place
            min(node.users, key=at.__getitem__).prepend(node)
        place = places(graph)


def _unpacking_of(launches: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [user for launch in launches for user in launch.users]
    while pending:
        node = pending.pop()
        if node not in found and node.target in UNPACKING:
            found.add(node)
            pending += node.users
    return found
