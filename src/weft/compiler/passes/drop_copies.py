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

from weft.compiler.passes.wait_late import UNPACKING

aten: Any = torch.ops.aten


def drop_copies(graph: fx.Graph, launches: list[fx.Node]) -> int:
    """Take copies of these launches' results out; how many there were."""
    fresh: set[fx.Node] = set()
    pending = [user for launch in launches for user in launch.users]
    num_dropped = 0
    while pending:
        node = pending.pop()
        if node in fresh:
            continue
        if node.target in UNPACKING:
            fresh.add(node)
            pending += node.users
        elif node.target is aten.clone.default and not _is_needed(node):
            users = list(node.users)
            source = node.args[0]
            node.replace_all_uses_with(source)  # type: ignore[arg-type]
            graph.erase_node(node)
            num_dropped += 1
            pending += users
    return num_dropped


def _is_needed(node: fx.Node) -> bool:
    """Whether the copy lies otherwise than what it is of, or somebody writes to it, or takes both."""
    source: Any = node.args[0]
    if node.meta["val"].stride() != source.meta["val"].stride():
        return True
    if any(_is_written(node, user) for user in (*node.users, *source.users)):
        return True
    outputs = [user for user in node.users if user.op == "output"]
    return bool(outputs) and any(user.op == "output" for user in source.users)


def _is_written(node: fx.Node, user: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable and user.target not in UNPACKING
