"""Gradients that are products of matrices are made in their bucket, not copied there.

Before: g = mm(a, b);  send_bucket([g, h])
After:  o = open_buckets();  p = multiply_in_place(a, b, after o);  send_bucket([p, h], after o)

So they take no memory of their own, and the step to the mean is done by the product. `p` is empty: it says
when, and that it was done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import add_call, places
from weft.compiler.ops import MULTIPLY, OPEN, SEND
from weft.compiler.passes.find_marks import Reducible
from weft.compiler.schedule import LARGE_NUMEL

aten: Any = torch.ops.aten
PRODUCTS: frozenset[Any] = frozenset({aten.mm.default, aten.addmm.default})
TURNS: frozenset[Any] = frozenset({aten.t.default, aten.permute.default, aten.transpose.int})


def make_in_place(graph: fx.Graph, found: Reducible) -> int:
    """Make what can be made in the buckets of this owner there; how many gradients that is."""
    sent = [node for node in found.launches if node.target is SEND]
    products = [
        (node, at, *product)
        for node, bucket in zip(sent, found.buckets, strict=False)
        for at, slot in enumerate(bucket.slots)
        if slot.numel >= LARGE_NUMEL and (product := _product_behind(node, at)) is not None
    ]
    if not products or _tunes_products():
        return 0
    place = places(graph)
    first = min((product for _, _, product, _ in products), key=place.__getitem__)
    with graph.inserting_before(first):
        opened = add_call(graph, OPEN, found.owner, sent[0].args[4])
    sent[0].update_arg(1, opened)
    for node, at, product, is_turned in products:
        _replace(graph, node, at, product, opened, is_turned=is_turned)
    return len(products)


def _product_behind(sent: fx.Node, at: int) -> tuple[fx.Node, bool] | None:
    """The product that this gradient is and nothing else, and whether the gradient is its transpose."""
    node: Any = sent.args[0][at]  # type: ignore[index]
    user, is_turned = sent, False
    while list(node.users) == [user] and node.target in TURNS and node.args[0].meta["val"].dim() == 2:
        is_turned ^= _turns(node)
        node, user = node.args[0], node
    is_alone = list(node.users) == [user] and sent.args[0].count(sent.args[0][at]) == 1  # type: ignore[union-attr, index]
    return (node, is_turned) if is_alone and node.target in PRODUCTS and not node.kwargs else None


def _turns(node: fx.Node) -> bool:
    """Whether this node of a matrix is its transpose: permuting and transposing may do nothing."""
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr]
    return node.args[1] % 2 != node.args[2] % 2  # type: ignore[operator]


def _replace(
    graph: fx.Graph, sent: fx.Node, at: int, product: fx.Node, opened: fx.Node, *, is_turned: bool
) -> None:
    *plus, left, right = product.args
    gradients = list(sent.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(product):
        made = add_call(
            graph, MULTIPLY, plus[0] if plus else None, left, right, opened, *sent.args[2:4], at, is_turned
        )
    turned: Any = gradients[at]
    gradients[at] = made
    sent.update_arg(0, gradients)
    while turned is not product:
        view, turned = turned, turned.args[0]
        graph.erase_node(view)
    graph.erase_node(product)


def _tunes_products() -> bool:
    """Whether Inductor chooses kernels for products itself, by trying."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)
