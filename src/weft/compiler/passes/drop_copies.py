"""Copies of what a collective brought go, where a view serves.

Before: wait, view, clone, output
After:  wait, view, output

A result of a collective is nobody else's memory. So a copy of it that is only handed out, or read, is not
needed: the parts of a bucket live in the bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import reached
from weft.compiler.ops import END, RECEIVE
from weft.compiler.passes.wait_late import UNPACKING, unpacking_of

aten: Any = torch.ops.aten


def drop_copies(graph: fx.Graph, launches: list[fx.Node]) -> int:
    """Take copies of these launches' results out; how many there were."""
    num_dropped = 0
    for launch in launches:
        while (copy := _find_needless(launch)) is not None:
            copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
            graph.erase_node(copy)
            num_dropped += 1
    return num_dropped


def _find_needless(launch: fx.Node) -> fx.Node | None:
    """A copy of what the launch brought that can go."""
    family = unpacking_of([launch])
    if any(_is_written(user) for node in family for user in node.users):
        return None
    for node in launch.graph.nodes:
        if node.target is aten.clone.default and node.args[0] in family:
            source: Any = node.args[0]
            if not _is_needed(node, source, family):
                return node
    return None


def _is_needed(copy: fx.Node, source: fx.Node, family: set[fx.Node]) -> bool:
    """Whether the copy lies otherwise than what it is of, or is written to, or both are handed out."""
    if copy.meta["val"].stride() != source.meta["val"].stride():
        return True
    mine = {copy, *unpacking_of([copy])}
    if any(_is_written(user) for node in mine for user in node.users):
        return True
    if not any(user.op == "output" for node in mine for user in node.users):
        return False
    above = reached([source], lambda node: node.all_input_nodes, lambda node: node in family)
    alike = {source, *unpacking_of([source]), *above}
    others = {user for node in alike for user in node.users if user is not copy}
    return any(user.op == "output" for user in others)


def _is_written(user: fx.Node) -> bool:
    """Whether this call may write to what it gets. Waiting counts as reading."""
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable and user.target not in (*UNPACKING, END, RECEIVE)
