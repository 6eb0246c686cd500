"""Before autograd is traced: the parameters of owners get marks on their gradients.

Before: weight = placeholder;  y = linear(x, weight)
After:  weight = placeholder;  marked = Marked.apply(owner, wire, [index], weight)[0];  y = linear(x, marked)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import last_placeholder
from weft.compiler.ops import Marked, owner_of
from weft.compiler.tracing import owners_here


def mark_parameters(graph: fx.Graph, owners: Iterable[int]) -> None:
    """Mark the gradients of all parameters of these owners that the graph has."""
    places = _places_of_tensors(graph)
    for number in dict.fromkeys(owners):
        owner = owner_of(number)
        inside = [(index, places[id(param)]) for index, param in owner.parameters() if id(param) in places]
        if inside:
            _mark(graph, number, owner.wire, inside)


def mark_noted(graph: fx.Graph) -> None:
    """The same for the owners that were noted in the tracing under way."""
    mark_parameters(graph, owners_here())


def _places_of_tensors(graph: fx.Graph) -> dict[int, fx.Node]:
    """The graph's inputs by the tensors that they were traced with."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        example: Any = getattr(node.meta.get("grapharg"), "example", None)
        if node.op == "placeholder" and isinstance(example, torch.Tensor):
            found[id(example)] = node
    return found


def _mark(graph: fx.Graph, owner: int, wire: str, inside: list[tuple[int, fx.Node]]) -> None:
    indices, nodes = [index for index, _ in inside], [node for _, node in inside]
    users = [(node, list(node.users)) for node in nodes]
    with graph.inserting_after(last_placeholder(graph)):
        marked = graph.call_function(Marked.apply, (owner, wire, indices, *nodes))
    values = [node.meta.get("example_value") for node in nodes]
    marked.meta["example_value"] = tuple(values)
    for at in reversed(range(len(nodes))):
        with graph.inserting_after(marked):
            piece = graph.call_function(operator.getitem, (marked, at))
        piece.meta["example_value"] = values[at]
        node, readers = users[at]
        for reader in readers:
            reader.replace_input_with(node, piece)
