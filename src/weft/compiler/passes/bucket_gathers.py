"""Small gatherings of parameters that follow each other become one.

Before: a' = wait(all_gather(a)), ..., b' = wait(all_gather(b))
After:  rows = wait(all_gather(cat(a, b))).view(ranks, -1);  a', b' = split(rows)

Each rank's parts of a and b lie side by side then, so that a' and b' are taken out column by column.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, add_call, value_of
from weft.compiler.passes.find_shards import GATHER, above, runs, wait_of

aten: Any = torch.ops.aten


def bucket_gathers(graph: fx.Graph, gathers: Sequence[fx.Node], cap_bytes: float) -> int:
    """Join neighbours up to this size; how many gatherings were spared."""
    return sum(_join(graph, run) for run in runs(gathers, cap_bytes))


def _join(graph: fx.Graph, run: Sequence[fx.Node]) -> int:
    if len(run) == 1:
        return 0
    first = run[0]
    _, num_ranks, group = first.args
    for launch in run[1:]:
        for node in above(launch):
            if node > first:
                first.prepend(node)
    shards = [launch.args[0] for launch in run]
    numels = [value_of(shard).numel() for shard in shards]
    with graph.inserting_before(first):
        flat = add_call(graph, aten.cat.default, shards)
        gathered = add_call(graph, WAIT, add_call(graph, GATHER, flat, num_ranks, group))
        rows = add_call(graph, aten.reshape.default, gathered, [num_ranks, sum(numels)])
        columns = add_call(graph, aten.split_with_sizes.default, rows, numels, 1)
        parts = [
            add_call(graph, aten.reshape.default, add_call(graph, operator.getitem, columns, at), [-1])
            for at in range(len(run))
        ]
    for launch, part in zip(run, parts, strict=True):
        wait = wait_of(launch)
        wait.replace_all_uses_with(part)
        graph.erase_node(wait)
        graph.erase_node(launch)
    return len(run) - 1
