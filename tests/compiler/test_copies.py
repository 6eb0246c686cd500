"""Copies of what a collective has brought go where a view serves, and stay where it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.compiler.hand_graphs import Draft, assert_same, run, written
from weft.compiler.graphs import WAIT, c10d
from weft.compiler.passes.drop_copies import drop_copies
from weft.compiler.passes.launch_early import launches_in

aten = torch.ops.aten


def _reduced(draft: Draft, *shape: int) -> fx.Node:
    return draft.call(WAIT, draft.call(c10d.all_reduce.default, draft.given("x", *shape), "sum", "g"))


def test_copies_that_are_handed_out_or_read_go() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    piece = draft.call(aten.slice.Tensor, waited, 0, 0, 4)
    copied = draft.call(aten.clone.default, draft.call(aten.reshape.default, piece, [2, 2]))
    rest = draft.call(aten.slice.Tensor, waited, 0, 4, 6)
    read = draft.call(aten.sin.default, draft.call(aten.clone.default, rest))
    graph = draft.give(copied, read)
    assert drop_copies(graph, launches_in(graph)) == 2
    graph.lint()
    assert written(graph) == [
        "all_reduce = all_reduce(x, sum, g)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 0, 4)",
        "reshape = reshape(slice, [2, 2])",
        "slice1 = slice(wait, 0, 4, 6)",
        "sin = sin(slice1)",
        "output(reshape, sin)",
    ]


def test_copies_of_copies() -> None:
    """However many stay: the numbers are the same, and the memory is not another's."""
    draft = Draft()
    waited = _reduced(draft, 6)
    copied = draft.call(aten.clone.default, waited)
    again = draft.call(aten.clone.default, copied)
    graph = draft.give(copied, draft.call(aten.clone.default, again))
    x = torch.randn(6)
    numbers = run(graph, x)
    assert drop_copies(graph, launches_in(graph)) > 0
    _assert_apart(graph)
    assert_same(run(graph, x), numbers)


def test_parts_of_one_bucket_are_apart_and_all_their_copies_go() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    pieces = [draft.call(aten.slice.Tensor, waited, 0, at, at + 2) for at in (0, 2, 4)]
    graph = draft.give(*(draft.call(aten.clone.default, piece) for piece in pieces))
    assert drop_copies(graph, launches_in(graph)) == 3
    assert written(graph)[-1] == "output(slice, slice1, slice2)"


def _lies_otherwise(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    turned = draft.call(aten.permute.default, waited, [1, 0])
    return [draft.call(aten.clone.default, turned, memory_format=torch.contiguous_format)]


def _is_written(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    copied = draft.call(aten.clone.default, waited)
    draft.call(aten.mul_.Tensor, copied, 3)
    return [copied, draft.call(aten.sin.default, waited)]


def _source_is_written(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    copied = draft.call(aten.clone.default, waited)
    draft.call(aten.mul_.Tensor, waited, 3)
    return [copied]


def _both_are_handed_out(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    return [waited, draft.call(aten.clone.default, waited)]


def _of_something_else(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    made = draft.call(aten.sin.default, waited)
    return [made, draft.call(aten.clone.default, made)]


NEEDED = [
    _lies_otherwise,
    _is_written,
    _source_is_written,
    _both_are_handed_out,
    _of_something_else,
]


@pytest.mark.parametrize("make", NEEDED, ids=lambda make: make.__name__)
def test_a_copy_that_must_stay(make: Callable[[Draft, fx.Node], list[fx.Node]]) -> None:
    draft = Draft()
    graph = draft.give(*make(draft, _reduced(draft, 2, 3)))
    before = written(graph)
    x = torch.randn(2, 3)
    numbers = run(graph, x)
    assert drop_copies(graph, launches_in(graph)) == 0
    assert written(graph) == before
    assert_same(run(graph, x), numbers)


def test_two_copies_of_one_result_that_are_handed_out_do_not_both_go() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    graph = draft.give(*(draft.call(aten.clone.default, waited) for _ in range(2)))
    drop_copies(graph, launches_in(graph))
    graph.lint()
    _assert_apart(graph)


def test_copies_of_two_views_of_the_same_memory_do_not_both_go() -> None:
    """What is handed out must not be the same memory twice: a caller may write to one."""
    draft = Draft()
    waited = _reduced(draft, 6)
    shaped = draft.call(aten.reshape.default, waited, [2, 3])
    graph = draft.give(draft.call(aten.clone.default, waited), draft.call(aten.clone.default, shaped))
    drop_copies(graph, launches_in(graph))
    _assert_apart(graph)


def test_a_copy_stays_where_a_view_of_its_source_is_handed_out() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    shaped = draft.call(aten.reshape.default, waited, [2, 3])
    graph = draft.give(shaped, draft.call(aten.clone.default, waited))
    drop_copies(graph, launches_in(graph))
    _assert_apart(graph)


def test_a_copy_stays_where_a_view_of_it_is_written_to() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    copied = draft.call(aten.clone.default, waited)
    draft.call(aten.mul_.Tensor, draft.call(aten.slice.Tensor, copied, 0, 0, 3), 3)
    graph = draft.give(copied, draft.call(aten.sin.default, waited))
    x = torch.randn(6)
    numbers = run(graph, x)
    drop_copies(graph, launches_in(graph))
    assert_same(run(graph, x), numbers)


def _assert_apart(graph: fx.Graph) -> None:
    """Its two outputs are no views of one node."""
    (outputs,) = next(iter(reversed(graph.nodes))).args
    assert isinstance(outputs, tuple)
    sources = [node for node in outputs if isinstance(node, fx.Node)]
    for at, node in enumerate(sources):
        while node.target is not aten.clone.default and node.target is not WAIT:
            (node,) = node.all_input_nodes
        sources[at] = node
    assert len(set(sources)) == len(sources), written(graph)
