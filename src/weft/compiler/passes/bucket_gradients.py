"""Marked gradients become buckets that are reduced in the graph, in one of three forms.

Before, for each parameter:
    marked = mark_gradient(g)
In buffers:
    b = send_bucket([g1, g2, ...]);  receive_buckets([b, ...]);  g1 = view of b; ...
By concatenation:
    w = wait(all_reduce(cat(g1 / n, g2 / n, ..., marks)));  g1 = view of w; ...
Coalesced:
    [h1, h2, ...] = all_reduce_coalesced([g1 / n, g2 / n, ..., marks]);  g1 = wait(h1); ...

Buffers are the reducer's own, and its own collectives and hooks move them: nothing is allocated, and on a
local group nothing is copied to be sent. The other two are ops that compilers know. The flat forms are what
the reducer sends without a compiler, to the number: a rank that runs a step without its graph takes part all
the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, add_call, c10d, places, value_of
from weft.compiler.ops import BEGIN, END, RECEIVE, SEND
from weft.compiler.passes.find_marks import Reducible
from weft.compiler.schedule import Bucket, Slot, Wire, encode_schedule

aten: Any = torch.ops.aten
CONVERT: Any = torch.ops.prims.convert_element_type.default


def bucket_by_concat(graph: fx.Graph, found: Reducible) -> int:
    """Reduce each bucket as one flat tensor; how many there are."""
    return _bucket(graph, found, _reduce_flat)


def bucket_by_coalescing(graph: fx.Graph, found: Reducible) -> int:
    """Reduce each bucket as a list of tensors; how many there are."""
    return _bucket(graph, found, _reduce_list)


def bucket_in_buffers(graph: fx.Graph, found: Reducible) -> int:
    """Let the owner reduce each bucket in its own memory, by its hook if it has one; how many there are."""
    schedule = encode_schedule(found.buckets, _order(graph, found))
    with graph.inserting_before(_first_mark(graph, found)):
        for number, bucket in enumerate(found.buckets):
            inside = [found.marks[slot.index].args[0] for slot in bucket.slots]
            after = found.launches[-1] if found.launches else None  # so that no compiler changes the order
            sent = add_call(graph, SEND, inside, after, found.owner, number, schedule)
            found.launches.append(sent)
        add_call(graph, RECEIVE, list(found.launches), found.owner)
        for bucket, flat in zip(found.buckets, found.launches, strict=True):
            _replace(found, dict(_take_apart(graph, bucket, flat)))
    _erase_marks(graph, found)
    return len(found.buckets)


Form = Callable[[fx.Graph, "_Job"], tuple[fx.Node, dict[int, fx.Node], fx.Node]]


class _Job:
    """One bucket of one graph."""

    def __init__(self, bucket: Bucket, wire: Wire, gradients: dict[int, Any], tail: fx.Node | None):
        self.bucket = bucket
        self.wire = wire
        self.gradients = gradients
        self.tail = tail


def _bucket(graph: fx.Graph, found: Reducible, form: Form) -> int:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        schedule = encode_schedule(found.buckets, _order(graph, found))
        tails = add_call(graph, BEGIN, found.owner, schedule)
    reduced_marks: list[fx.Node] = []
    with graph.inserting_before(_first_mark(graph, found)):
        for number, bucket in enumerate(found.buckets):
            gradients = {slot.index: found.marks[slot.index].args[0] for slot in bucket.slots}
            tail = add_call(graph, operator.getitem, tails, number) if found.wire.has_marks else None
            launched, results, marks = form(graph, _Job(bucket, found.wire, gradients, tail))
            found.launches.append(launched)
            reduced_marks.append(marks)
            _replace(found, results)
        if not found.wire.has_marks:
            reduced_marks.append(add_call(graph, operator.getitem, tails, 0))  # else nobody needs the begin
        add_call(graph, END, reduced_marks, found.owner)
    _erase_marks(graph, found)
    return len(found.buckets)


def _order(graph: fx.Graph, found: Reducible) -> list[int]:
    """The parameters, as their gradients come."""
    place = places(graph)
    made: dict[int, Any] = {index: mark.args[0] for index, mark in found.marks.items()}
    return sorted(made, key=lambda index: place[made[index]])


def _first_mark(graph: fx.Graph, found: Reducible) -> fx.Node:
    """Where buckets go: all gradients are made before it, and all that reads them comes after."""
    return min(found.marks.values(), key=places(graph).__getitem__)


def _replace(found: Reducible, results: dict[int, fx.Node]) -> None:
    for index, node in results.items():
        found.marks[index].replace_all_uses_with(node)


def _erase_marks(graph: fx.Graph, found: Reducible) -> None:
    for node in found.marks.values():
        graph.erase_node(node)


# One flat tensor


def _reduce_flat(graph: fx.Graph, job: _Job) -> tuple[fx.Node, dict[int, fx.Node], fx.Node]:
    bucket, wire = job.bucket, job.wire
    pieces = [_narrow(graph, _flatten(graph, job.gradients[slot.index], slot), wire) for slot in bucket.slots]
    flat = add_call(graph, aten.cat.default, [*pieces, *([job.tail] if job.tail is not None else [])])
    launched = add_call(graph, c10d.all_reduce.default, flat, "sum", wire.group)
    waited = add_call(graph, WAIT, launched)
    marks = add_call(graph, aten.slice.Tensor, waited, 0, *_tail_range(bucket, wire))
    wide = waited if wire.dtype is None else add_call(graph, CONVERT, waited, bucket.dtype)
    return launched, dict(_take_apart(graph, bucket, wide)), marks


def _take_apart(graph: fx.Graph, bucket: Bucket, flat: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The gradients of a bucket by parameter, as views of it."""
    start = 0
    for slot in bucket.slots:
        yield slot.index, _unflatten(graph, flat, slot, start)
        start += slot.numel


def _tail_range(bucket: Bucket, wire: Wire) -> tuple[int, int]:
    numel = sum(slot.numel for slot in bucket.slots)
    return (numel, numel + len(bucket.slots) + 1) if wire.has_marks else (max(numel - 1, 0), numel)


def _flatten(graph: fx.Graph, gradient: fx.Node, slot: Slot) -> fx.Node:
    if len(slot.shape) == 1:
        return gradient
    if slot.order != tuple(range(len(slot.shape))):
        gradient = add_call(graph, aten.permute.default, gradient, list(slot.order))
    if not slot.shape:
        return add_call(graph, aten.reshape.default, gradient, [1])
    return add_call(graph, aten.flatten.using_ints, gradient, 0, -1)


def _unflatten(graph: fx.Graph, flat: fx.Node, slot: Slot, start: int) -> fx.Node:
    piece = add_call(graph, aten.slice.Tensor, flat, 0, start, start + slot.numel)
    lying = [slot.shape[dim] for dim in slot.order]
    if len(slot.shape) != 1:
        piece = add_call(graph, aten.reshape.default, piece, lying)
    if slot.order == tuple(range(len(slot.shape))):
        return piece
    back = sorted(range(len(slot.order)), key=slot.order.__getitem__)
    return add_call(graph, aten.permute.default, piece, back)


def _narrow(graph: fx.Graph, gradient: fx.Node, wire: Wire) -> fx.Node:
    """A gradient's share of the mean: as the reducer computes it, so that the numbers are the same."""
    if wire.dtype is None:
        return add_call(graph, aten.mul.Tensor, gradient, 1.0 / wire.size)
    return add_call(graph, CONVERT, add_call(graph, aten.div.Tensor, gradient, wire.size), wire.dtype)


# A list


def _reduce_list(graph: fx.Graph, job: _Job) -> tuple[fx.Node, dict[int, fx.Node], fx.Node]:
    bucket, wire = job.bucket, job.wire
    pieces = [_narrow(graph, job.gradients[slot.index], wire) for slot in bucket.slots]
    given = [*pieces, *([job.tail] if job.tail is not None else [])]
    launched = add_call(graph, c10d.all_reduce_coalesced.default, given, "sum", wire.group)
    waited = [
        add_call(graph, WAIT, add_call(graph, operator.getitem, launched, at)) for at in range(len(given))
    ]
    results: dict[int, fx.Node] = {}
    for slot, node in zip(bucket.slots, waited, strict=False):
        narrow = value_of(node).dtype != bucket.dtype
        results[slot.index] = add_call(graph, CONVERT, node, bucket.dtype) if narrow else node
    return launched, results, waited[-1]
