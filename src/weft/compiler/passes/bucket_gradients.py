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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import WAIT, add_call, c10d, last_of, places, value_of
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
    place = places(graph)
    gradients = {index: node.args[0] for index, node in found.marks.items()}
    order = sorted(gradients, key=lambda index: place[gradients[index]])  # type: ignore[index]
    schedule = encode_schedule(found.buckets, order)
    flats: list[fx.Node] = []
    for number, bucket in enumerate(found.buckets):
        inside = [gradients[slot.index] for slot in bucket.slots]
        after = flats[-1] if flats else None  # so that no compiler changes the order
        with graph.inserting_before(_output(graph)):
            flats.append(add_call(graph, SEND, inside, after, found.owner, number, schedule))
    with graph.inserting_before(_output(graph)):
        add_call(graph, RECEIVE, flats, found.owner)
        for bucket, flat in zip(found.buckets, flats, strict=True):
            for slot, piece in _take_apart(graph, bucket, flat):
                found.marks[slot.index].replace_all_uses_with(piece)
    for node in found.marks.values():
        graph.erase_node(node)
    return len(found.buckets)


Form = Callable[[fx.Graph, "_Job"], tuple[dict[int, fx.Node], fx.Node]]


class _Job:
    """One bucket of one graph."""

    def __init__(self, bucket: Bucket, wire: Wire, gradients: dict[int, fx.Node], tail: fx.Node | None):
        self.bucket = bucket
        self.wire = wire
        self.gradients = gradients
        self.tail = tail


def _bucket(graph: fx.Graph, found: Reducible, form: Form) -> int:
    place = places(graph)
    order = sorted(found.marks, key=lambda index: place[found.marks[index].args[0]])  # type: ignore[index]
    tails = _begin(graph, found, order)
    reduced_marks: list[fx.Node] = []
    for number, bucket in enumerate(found.buckets):
        marks = {slot.index: found.marks[slot.index] for slot in bucket.slots}
        gradients = {index: node.args[0] for index, node in marks.items()}
        tail = _at(graph, tails, number) if found.wire.has_marks else None
        with graph.inserting_after(last_of(marks.values(), place)):
            anchor = graph.call_function(operator.pos, (0,))  # where the bucket goes: nodes line up before it
        with graph.inserting_before(anchor):
            results, marks_after = form(graph, _Job(bucket, found.wire, gradients, tail))  # type: ignore[arg-type]
        graph.erase_node(anchor)
        reduced_marks.append(marks_after)
        for index, node in marks.items():
            node.replace_all_uses_with(results[index])
    for node in found.marks.values():
        graph.erase_node(node)
    with graph.inserting_before(_output(graph)):
        add_call(graph, END, reduced_marks, found.owner)
    return len(found.buckets)


def _begin(graph: fx.Graph, found: Reducible, order: Sequence[int]) -> fx.Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        return add_call(graph, BEGIN, found.owner, encode_schedule(found.buckets, order))


def _at(graph: fx.Graph, items: fx.Node, number: int) -> fx.Node:
    with graph.inserting_after(items):
        return add_call(graph, operator.getitem, items, number)


def _output(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


# One flat tensor


def _reduce_flat(graph: fx.Graph, job: _Job) -> tuple[dict[int, fx.Node], fx.Node]:
    bucket, wire = job.bucket, job.wire
    pieces = [_narrow(graph, _flatten(graph, job.gradients[slot.index], slot), wire) for slot in bucket.slots]
    flat = add_call(graph, aten.cat.default, [*pieces, *([job.tail] if job.tail is not None else [])])
    launched = add_call(graph, c10d.all_reduce.default, flat, "sum", wire.group)
    waited = add_call(graph, WAIT, launched)
    marks = add_call(graph, aten.slice.Tensor, waited, 0, *_tail_range(bucket, wire))
    wide = waited if wire.dtype is None else add_call(graph, CONVERT, waited, bucket.dtype)
    return {slot.index: piece for slot, piece in _take_apart(graph, bucket, wide)}, marks


def _take_apart(graph: fx.Graph, bucket: Bucket, flat: fx.Node) -> Iterator[tuple[Slot, fx.Node]]:
    """The gradients of a bucket, as views of it."""
    start = 0
    for slot in bucket.slots:
        yield slot, _unflatten(graph, flat, slot, start)
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


def _reduce_list(graph: fx.Graph, job: _Job) -> tuple[dict[int, fx.Node], fx.Node]:
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
    return results, waited[-1]
