"""Large gradients are made in their bucket, not copied there: products of matrices, and sums of rows.

Before: g = mm(a, b);  send_bucket([g, h])
After:  o = open_buckets();  p = multiply_in_place(a, b, after o);  send_bucket([p, h], after o)

Before: e = index_put(zeros, rows, values, accumulate);  g = addmm(e, a, b);  send_bucket([g])
After:  p = multiply_in_place(a, b, after o);  q = add_rows_in_place(rows, values, after p);  send_bucket([q])

So they take no memory of their own, and the step to the mean is done on the way. What such a call brings is
empty: it says that it was done. The second form is an embedding whose weight is also the last layer's.

On the CPU only: elsewhere one kernel copies all gradients of a bucket, and another one scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import add_call, places
from weft.compiler.ops import ADD_ROWS, MULTIPLY, OPEN, SEND
from weft.compiler.passes.find_marks import Reducible
from weft.compiler.schedule import LARGE_NUMEL

aten: Any = torch.ops.aten
PRODUCTS: frozenset[Any] = frozenset({aten.mm.default, aten.addmm.default})
TURNS: frozenset[Any] = frozenset({aten.t.default, aten.permute.default, aten.transpose.int})
MASKED: Any = aten._unsafe_masked_index_put_accumulate.default
SCATTERS: frozenset[Any] = frozenset({MASKED, aten.index_put.default, aten._unsafe_index_put.default})


@dataclass(frozen=True, slots=True)
class _Place:
    """A gradient that can be made in its bucket: `made` is all of it, or its transpose."""

    sent: fx.Node
    at: int
    made: fx.Node
    is_turned: bool


def make_in_place(graph: fx.Graph, found: Reducible) -> int:
    """Make what can be made in the buckets of this owner there; how many gradients that is."""
    sent = [node for node in found.launches if node.target is SEND]
    places_ = [
        place
        for node, bucket in zip(sent, found.buckets, strict=False)
        for at, slot in enumerate(bucket.slots)
        if slot.numel >= LARGE_NUMEL and bucket.device.type == "cpu"
        if (place := _find_place(node, at)) is not None
    ]
    if not places_ or _tunes_products():
        return 0
    order = places(graph)
    first = min([sent[0], *(place.made for place in places_)], key=order.__getitem__)
    with graph.inserting_before(first):
        opened = add_call(graph, OPEN, found.owner, sent[0].args[4])
    sent[0].update_arg(1, opened)
    for place in places_:
        with graph.inserting_before(place.made):
            made = _add_calls(graph, place, opened)
        _put(graph, place, made)
    return len(places_)


def _find_place(sent: fx.Node, at: int) -> _Place | None:
    """The product or the scattering that this gradient is, and nothing else."""
    gradients: Any = sent.args[0]
    node, user, is_turned = gradients[at], sent, False
    while list(node.users) == [user] and node.target in TURNS and node.args[0].meta["val"].dim() == 2:
        is_turned ^= _turns(node)
        node, user = node.args[0], node
    if list(node.users) != [user] or gradients.count(gradients[at]) != 1:
        return None
    is_product = node.target in PRODUCTS and not node.kwargs
    is_made = is_product or (not is_turned and _scatters_rows(node))
    return _Place(sent, at, node, is_turned) if is_made else None


def _turns(node: fx.Node) -> bool:
    """Whether this node of a matrix is its transpose: permuting and transposing may do nothing."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr]
    return node.args[1] % 2 != node.args[2] % 2  # type: ignore[operator]


def _scatters_rows(node: Any) -> bool:
    """Whether this adds rows to a matrix of zeros."""
    if not isinstance(node, fx.Node) or node.target not in SCATTERS or node.kwargs:
        return False
    base: Any = node.args[0]
    *_, indices, _ = node.args if node.target is MASKED else node.args[:3]
    adds = node.target is MASKED or node.args[3:] == (True,)
    is_zeros = base.target is aten.full.default and base.args[1] == 0 and base.meta["val"].dim() == 2
    is_by_row = len(indices) == 1 and indices[0] is not None and not _is_mask(indices[0])  # type: ignore[arg-type, index]
    return adds and is_zeros and is_by_row


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    return one.meta["val"].shape == other.meta["val"].shape


def _is_mask(index: fx.Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _add_calls(graph: fx.Graph, place: _Place, opened: fx.Node) -> fx.Node:
    where = (*place.sent.args[2:4], place.at)
    if _scatters_rows(place.made):
        return _add_rows(graph, place.made, True, opened, where)
    *rest, left, right = place.made.args
    plus: Any = rest[0] if rest else None
    if not place.is_turned and _scatters_rows(plus) and len(plus.users) == 1 and _are_alike(plus, place.made):
        made = add_call(graph, MULTIPLY, None, left, right, False, opened, *where)
        return _add_rows(graph, plus, False, made, where)
    return add_call(graph, MULTIPLY, plus, left, right, place.is_turned, opened, *where)


def _add_rows(
    graph: fx.Graph, scattered: fx.Node, is_first: bool, after: fx.Node, where: tuple[Any, ...]
) -> fx.Node:
    if scattered.target is MASKED:
        _, mask, (rows,), values = scattered.args  # type: ignore[misc]
    else:
        _, (rows,), values, _ = scattered.args  # type: ignore[misc]
        mask = None
    return add_call(graph, ADD_ROWS, rows, values, mask, is_first, after, *where)


def _put(graph: fx.Graph, place: _Place, made: fx.Node) -> None:
    """Send what was made in place, and take out what nobody needs now."""
    gradients = list(place.sent.args[0])  # type: ignore[arg-type]
    pending: list[fx.Node] = [gradients[place.at]]
    gradients[place.at] = made
    place.sent.update_arg(0, gradients)
    while pending:
        node = pending.pop()
        if node.target in PRODUCTS | TURNS | SCATTERS | {aten.full.default} and not node.users:
            pending += node.all_input_nodes
            graph.erase_node(node)


def _tunes_products() -> bool:
    """Whether Inductor chooses kernels for products itself, by trying."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)
