"""The collectives of sharded parameters in a graph: gathered from its inputs, scattered to its outputs.

A gathering of parameters needs nothing but inputs of the graph, packed. A scattering of gradients brings what
no other collective of the graph needs. Collectives inside of the model are neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import LAUNCHES, WAIT, c10d, calls, reached, value_of

aten: Any = torch.ops.aten
GATHER: Any = c10d.all_gather_into_tensor.default
SCATTER: Any = c10d.reduce_scatter_tensor.default
# What makes a shard of a rank's pieces.
SHARD_PACKING: frozenset[Any] = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.detach.default,
        aten.reshape.default,
        aten.view.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def find_gathers(graph: fx.Graph) -> list[fx.Node]:
    """The gatherings of parameters, in order."""
    found = [node for node in calls(graph, GATHER) if _is_waited_for(node)]
    return [node for node in found if all(part.target in SHARD_PACKING for part in above(node))]


def find_scatters(graph: fx.Graph) -> list[fx.Node]:
    """The scatterings of gradients, in order."""
    found = [node for node in calls(graph, SCATTER) if _is_waited_for(node)]
    return [node for node in found if not any(part.target in LAUNCHES for part in below([node]))]


def _is_waited_for(launch: fx.Node) -> bool:
    return [user.target for user in launch.users] == [WAIT]


def above(node: fx.Node) -> list[fx.Node]:
    """All that a node needs, inputs of the graph not included, in order."""
    return _in_order(node.graph, reached([node], lambda at: at.all_input_nodes, _is_computed))


def below(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """All that needs one of these nodes, the output not included, in order."""
    return _in_order(nodes[0].graph, reached(nodes, lambda at: at.users, _is_computed))


def _is_computed(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")


def _in_order(graph: fx.Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in graph.nodes if node in nodes]


def wait_of(launch: fx.Node) -> fx.Node:
    """The wait for a launch."""
    (wait,) = launch.users
    return wait


def kind_of(launch: fx.Node) -> Hashable:
    """What launches must have in common to be one: the group, the operator and the dtype."""
    return (launch.target, *launch.args[1:], value_of(launch.args[0]).dtype)


def runs(launches: Sequence[fx.Node], cap_bytes: float) -> Iterator[list[fx.Node]]:
    """Neighbours of one kind, as many as the cap allows for what they move."""
    run: list[fx.Node] = []
    num_bytes = 0
    for launch in launches:
        more = max(value_of(node).nbytes for node in (launch, launch.args[0]))
        if run and (kind_of(launch) != kind_of(run[0]) or num_bytes + more > cap_bytes):
            yield run
            run, num_bytes = [], 0
        run.append(launch)
        num_bytes += more
    if run:
        yield run


def moved_numels(launches: Sequence[fx.Node]) -> Counter[Hashable]:
    """How many elements travel, by kind: passes change the number of collectives only."""
    moved: Counter[Hashable] = Counter()
    for launch in launches:
        moved[kind_of(launch)] += value_of(launch.args[0]).numel()
    return moved
