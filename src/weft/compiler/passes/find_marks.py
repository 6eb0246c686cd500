"""Which gradients of the graph can be reduced in it; marks of the others are taken out.

A graph reduces an owner's gradients if it has all of them, each once. One that has some (the module's
forward was broken into several graphs, or uses a part of it) leaves them to the owner, who gets them from
autograd and knows what is missing. What compiled autograd has traced is reduced in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from weft.compiler.graphs import add_call, calls, places
from weft.compiler.ops import LEAVE, MARK, REDUCE, owner_of
from weft.compiler.schedule import Bucket, Wire


@dataclass(slots=True)
class Reducible:
    """The gradients of one owner in one graph."""

    owner: int
    wire: Wire
    buckets: list[Bucket]
    marks: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])  # by parameter
    launches: list[fx.Node] = field(default_factory=list[fx.Node])  # one a bucket, once they are made


def find_reducible(graph: fx.Graph) -> list[Reducible]:
    """What to reduce in this graph, by owner, in the order of the first gradients. All other marks go."""
    reduces = calls(graph, REDUCE)
    # Those of compiled autograd stand behind the ones that its parts have from their own compilation.
    _drop(graph, [node for node in calls(graph, MARK) if reduces])
    found: dict[tuple[int, str], list[fx.Node]] = {}
    for node in reduces or calls(graph, MARK):
        _, owner, _, wire = node.args
        found.setdefault((owner, wire), []).append(node)  # type: ignore[arg-type]
    kept: list[Reducible] = []
    for (owner, wire), nodes in found.items():
        marks = {int(node.args[2]): node for node in nodes}  # type: ignore[arg-type]
        buckets = list(owner_of(owner).buckets())
        if is_whole(buckets, marks, len(nodes)) and _sink(graph, nodes):
            kept.append(Reducible(owner, Wire.decode(wire), buckets, marks))
        elif not reduces:
            _leave(graph, owner, nodes)
    for reducible in [one for one in kept if not _is_behind(graph, one)]:  # moved by another owner's marks
        kept.remove(reducible)
        if not reduces:
            _leave(graph, reducible.owner, list(reducible.marks.values()))
    return kept


def _is_behind(graph: fx.Graph, found: Reducible) -> bool:
    """Whether all marks stand behind all gradients."""
    place = places(graph)
    first = min(place[mark] for mark in found.marks.values())
    return all(place[mark.args[0]] < first for mark in found.marks.values())  # type: ignore[index]


def _leave(graph: fx.Graph, owner: int, marks: list[fx.Node]) -> None:
    """Let the owner reduce these gradients when autograd hands them over."""
    with graph.inserting_after(marks[0]):
        add_call(graph, LEAVE, marks[0].args[0], owner)
    _drop(graph, marks)


def is_whole(buckets: list[Bucket], marks: dict[int, fx.Node], num_marks: int) -> bool:
    """Whether each gradient of the buckets is there once, and fits into its place."""
    slots = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
    if len(marks) != num_marks or {slot.index for slot, _ in slots} != set(marks):
        return False
    for slot, bucket in slots:
        value = marks[slot.index].meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != bucket.dtype:
            return False
        if tuple(value.shape) != slot.shape or value.device != bucket.device:
            return False
    return True


def _sink(graph: fx.Graph, marks: list[fx.Node]) -> bool:
    """Move marks, and all that reads marked gradients, behind all gradients; False if one needs another."""
    behind = set(marks)
    for node in graph.nodes:  # in order, so that users of users are found
        if node.op != "output" and any(below in behind for below in node.all_input_nodes):
            behind.add(node)
    if any(mark.args[0] in behind for mark in marks):
        return False
    output = next(iter(reversed(graph.nodes)))
    for node in [node for node in graph.nodes if node in behind]:
        output.prepend(node)
    return True


def _drop(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in nodes:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
