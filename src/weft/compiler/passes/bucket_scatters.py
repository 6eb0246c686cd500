"""Small scatterings of gradients that follow each other become one.

Before: a' = wait(reduce_scatter(a)), ..., b' = wait(reduce_scatter(b))
After:  rows = cat(a.view(ranks, -1), b.view(ranks, -1));  a', b' = split(wait(reduce_scatter(rows)))

What is made of a' waits until b is there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, add_call, value_of
from weft.compiler.passes.find_shards import SCATTER, below, runs, wait_of

aten: Any = torch.ops.aten


def bucket_scatters(graph: fx.Graph, scatters: Sequence[fx.Node], cap_bytes: float) -> int:
    """Join neighbours up to this size; how many scatterings were spared."""
    return sum(_join(graph, run) for run in runs(scatters, cap_bytes))


def _join(graph: fx.Graph, run: Sequence[fx.Node]) -> int:
    last = run[-1]
    waits = [wait_of(launch) for launch in run]
    results = below(waits)
    inside = {*results, *waits}
    is_ready = all(node < last for part in results for node in part.all_input_nodes if node not in inside)
    if len(run) == 1 or not is_ready:
        return 0
    _, op, num_ranks, group = last.args
    numels = [value_of(wait).numel() for wait in waits]
    with graph.inserting_before(last):
        columns = [
            add_call(graph, aten.reshape.default, launch.args[0], [num_ranks, numel])
            for launch, numel in zip(run, numels, strict=True)
        ]
        table = add_call(graph, aten.reshape.default, add_call(graph, aten.cat.default, columns, 1), [-1])
        reduced = add_call(graph, WAIT, add_call(graph, SCATTER, table, op, num_ranks, group))
        shards = add_call(graph, aten.split_with_sizes.default, reduced, numels)
        parts = [add_call(graph, operator.getitem, shards, at) for at in range(len(run))]
    for node in results:
        last.prepend(node)
    for launch, wait, part in zip(run, waits, parts, strict=True):
        wait.replace_all_uses_with(part)
        graph.erase_node(wait)
        graph.erase_node(launch)
    return len(run) - 1
