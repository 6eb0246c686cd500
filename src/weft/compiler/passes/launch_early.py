"""Reductions start as soon as their gradients are there.

Before: all gradients, then  cat, all_reduce, cat, all_reduce, ...
After:  the gradients of a bucket, its cat and all_reduce, the gradients of the next, ...

Launches keep the order that they have among themselves, since ranks must agree on it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import LAUNCHES, last_of, last_placeholder, needed_after, places

aten: Any = torch.ops.aten
# What a launch takes with it: its own packing, which nobody else reads.
PACKING: frozenset[Any] = frozenset(
    {
        aten.cat.default,
        aten.div.Tensor,
        aten.flatten.using_ints,
        aten.mul.Tensor,
        aten.permute.default,
        aten.reshape.default,
        torch.ops.prims.convert_element_type.default,
        operator.getitem,
    }
)


def launch_early(graph: fx.Graph, launches: list[fx.Node]) -> None:
    """Move these launches, given in their order, up to where their inputs are made."""
    before: fx.Node | None = None
    for launch in launches:
        packing = _packing_of(launch)
        moved = {*packing, launch}
        inputs = [node for mine in moved for node in mine.all_input_nodes if node not in moved]
        place = places(graph)
        behind = last_of([*inputs, *([before] if before is not None else [])], place)
        for node in [*needed_after(launch, packing), launch]:
            if behind.op == "placeholder":
                behind = last_placeholder(graph)
            behind.append(node)
            behind = node
        before = launch


def _packing_of(launch: fx.Node) -> set[fx.Node]:
    """The nodes that only make the launch's input."""
    found: set[fx.Node] = set()
    pending = list(launch.all_input_nodes)
    while pending:
        node = pending.pop()
        is_ours = node.target in PACKING and all(user in found or user is launch for user in node.users)
        if is_ours and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def launches_in(graph: fx.Graph) -> list[fx.Node]:
    """All collectives of the graph, in order."""
    return [node for node in graph.nodes if node.target in LAUNCHES]
