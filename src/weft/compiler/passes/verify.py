"""Every gradient is reduced exactly once, in its owner's order, and every wait comes before its use. Or it raises."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from weft.compiler.graphs import LAUNCHES, WAIT, calls, places
from weft.compiler.ops import BEGIN, END, MARK, REDUCE
from weft.compiler.passes.find_marks import Reducible
from weft.errors import InternalError


def verify(graph: fx.Graph, found: Sequence[Reducible]) -> None:
    """Raise if the graph doesn't do what was to be done."""
    graph.lint()
    _check_marks(graph, found)
    _check_order(graph)
    for launch in (node for node in graph.nodes if node.target in LAUNCHES):
        _check_waits(launch)


def _check_marks(graph: fx.Graph, found: Sequence[Reducible]) -> None:
    owners = {reducible.owner for reducible in found}
    for node in calls(graph, MARK, REDUCE):
        if node.args[1] in owners:
            raise InternalError(f"gradient {node.args[2]} of a compiled module was left out of its bucket")
    for op, word in ((BEGIN, "begins"), (END, "ends")):
        told = [node.args[0 if op is BEGIN else 1] for node in calls(graph, op)]
        if sorted(told) != sorted(owners):  # type: ignore[type-var]
            raise InternalError(f"a graph {word} reductions of {told}, and has gradients of {owners}")


def _check_order(graph: fx.Graph) -> None:
    place = places(graph)
    for node in graph.nodes:
        late = [below for below in node.all_input_nodes if place[below] >= place[node]]
        if late:
            raise InternalError(f"a pass put {node} before {late[0]}, which it needs")


def _check_waits(launch: fx.Node) -> None:
    """What a launch brings may only be waited for."""
    for user in launch.users:
        readers = list(user.users) if user.target is operator.getitem else [user]
        if any(reader.target is not WAIT for reader in readers):
            raise InternalError(f"{launch} is used before it was waited for")
    if not launch.users:
        raise InternalError(f"{launch} is never waited for")
