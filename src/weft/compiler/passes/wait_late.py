"""Waits go down to where their results are used.

Before: all_reduce, wait, views, then the rest of the backward
After:  all_reduce, the rest of the backward, wait, views

What is in between runs while the collective does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, reached

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
    for node in sorted(unpacking_of(launches), reverse=True):
        if node.users:
            min(node.users).prepend(node)


def unpacking_of(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """Waits for launches, and what lies in the memory that they brought; or views of other nodes."""
    return reached(starts, lambda node: node.users, lambda node: node.target in UNPACKING)
