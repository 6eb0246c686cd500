"""Small steps on fx graphs that several passes take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from weft.compiler.ops import SEND

c10d: Any = torch.ops._c10d_functional
WAIT: Any = c10d.wait_tensor.default
LAUNCHES: frozenset[Any] = frozenset(
    {
        SEND,
        c10d.all_reduce.default,
        c10d.all_reduce_coalesced.default,
        c10d.all_gather_into_tensor.default,
        c10d.all_gather_into_tensor_coalesced.default,
        c10d.reduce_scatter_tensor.default,
        c10d.reduce_scatter_tensor_coalesced.default,
    }
)


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of these ops, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def value_of(node: Any) -> Any:
    """What a node brings, as a fake tensor; anything else as it is."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def add_call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call of an op at the graph's insertion point, with what it brings."""
    node = graph.call_function(target, args)
    values = pytree.tree_map_only(fx.Node, value_of, args)
    fakes = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    mode = _fake_mode(graph) if not fakes else getattr(fakes[0], "fake_mode", None)
    if mode is None:
        node.meta["val"] = target(*values)
    else:
        with mode:
            node.meta["val"] = target(*values)
    return node


def _fake_mode(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                return mode
    return None


def places(graph: fx.Graph) -> dict[fx.Node, int]:
    """Where each node stands."""
    return {node: at for at, node in enumerate(graph.nodes)}


def last_of(nodes: Iterable[fx.Node], place: dict[fx.Node, int]) -> fx.Node:
    """The one that stands last."""
    return max(nodes, key=place.__getitem__)


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """The last of the graph's inputs."""
    return [node for node in graph.nodes if node.op == "placeholder"][-1]


def reached(
    starts: Iterable[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]],
    is_inside: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """All nodes to which a way leads from these, step by step, through nodes that are inside."""
    found: set[fx.Node] = set()
    pending = [node for start in starts for node in following(start)]
    while pending:
        node = pending.pop()
        if node not in found and is_inside(node):
            found.add(node)
            pending += following(node)
    return found


def needed_after(node: fx.Node, nodes: set[fx.Node]) -> Iterator[fx.Node]:
    """The given nodes that this one needs, directly or through other given ones, inputs first."""
    seen: set[fx.Node] = set()

    def visit(current: fx.Node) -> Iterator[fx.Node]:
        for below in current.all_input_nodes:
            if below in nodes and below not in seen:
                seen.add(below)
                yield from visit(below)
                yield below

    yield from visit(node)
