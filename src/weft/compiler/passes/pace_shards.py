"""Sharded parameters travel one step ahead, their gradients one step behind.

No further: memory is why they are sharded.

Before: gather 1, wait 1, layer 1, gather 2, wait 2, layer 2, ...
After:  gather 1, gather 2, wait 1, layer 1, gather 3, wait 2, layer 2, ...

Before: layer 2, scatter 2, wait 2, layer 1, scatter 1, wait 1
After:  layer 2, scatter 2, layer 1, wait 2, scatter 1, wait 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from weft.compiler.passes.find_shards import above, below, wait_of
from weft.compiler.passes.wait_late import wait_late


def pace_gathers(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
    """Start each gathering before the one before it is waited for, at its first use."""
    wait_late(graph, list(gathers))
    for before, launch in pairwise(gathers):
        goal = wait_of(before)
        for node in [*above(launch), launch]:
            if node > goal:
                goal.prepend(node)


def pace_scatters(graph: fx.Graph, scatters: Sequence[fx.Node]) -> None:
    """Wait for each scattering when the next one is about to start, and make gradients of it then."""
    for launch, following in pairwise(scatters):
        wait = wait_of(launch)
        results = [wait, *below([wait])]
        inside = {*results, launch}
        others = [node for part in results for node in part.all_input_nodes if node not in inside]
        if all(node < following for node in others):
            for node in results:
                following.prepend(node)
