"""The passes behind the launches: waits go down, and copies of what has come go where a view serves."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.compile_bodies.hand_graphs import Draft, HandOwner, bucket, run, slot, written
from weft.compiler.graphs import WAIT, c10d
from weft.compiler.ops import RECEIVE, SEND
from weft.compiler.passes.drop_copies import drop_copies
from weft.compiler.passes.launch_early import launches_in
from weft.compiler.passes.wait_late import wait_late
from weft.compiler.schedule import encode_schedule

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


# wait_late


def test_a_wait_and_its_views_go_down_to_their_use() -> None:
    draft = Draft()
    x, y = draft.given("x", 6), draft.given("y", 2)
    waited = draft.call(WAIT, draft.call(c10d.all_reduce.default, x, "sum", "g"))
    piece = draft.call(aten.slice.Tensor, waited, 0, 0, 4)
    shaped = draft.call(aten.permute.default, draft.call(aten.reshape.default, piece, [2, 2]), [1, 0])
    wide = draft.call(CONVERT, shaped, torch.float64)
    rest = draft.call(aten.sin.default, y)
    graph = draft.give(wide, draft.call(aten.cos.default, rest))
    numbers = run(graph, torch.randn(6), torch.randn(2))
    del numbers
    wait_late(graph, launches_in(graph))
    graph.lint()
    assert written(graph) == [
        "all_reduce = all_reduce(x, sum, g)",
        "sin = sin(y)",
        "cos = cos(sin)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 0, 4)",
        "reshape = reshape(slice, [2, 2])",
        "permute = permute(reshape, [1, 0])",
        "convert = convert(permute, torch.float64)",
        "output(convert, cos)",
    ]


def test_a_wait_that_is_used_in_the_middle_stays_before_that() -> None:
    draft = Draft()
    x, y = draft.given("x", 4), draft.given("y", 2)
    waited = draft.call(WAIT, draft.call(c10d.all_reduce.default, x, "sum", "g"))
    first = draft.call(aten.slice.Tensor, waited, 0, 0, 2)
    second = draft.call(aten.slice.Tensor, waited, 0, 2, 4)
    early = draft.call(aten.sin.default, y)
    middle = draft.call(aten.add.Tensor, second, early)
    end = draft.call(aten.cos.default, y)
    graph = draft.give(first, second, middle, end)
    wait_late(graph, launches_in(graph))
    graph.lint()
    assert written(graph) == [
        "all_reduce = all_reduce(x, sum, g)",
        "sin = sin(y)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 2, 4)",
        "add = add(slice, sin)",
        "cos = cos(y)",
        "slice1 = slice(wait, 0, 0, 2)",
        "output(slice1, slice, add, cos)",
    ]


def test_a_result_that_nobody_uses_is_still_waited_for() -> None:
    draft = Draft()
    x = draft.given("x", 4)
    draft.call(WAIT, draft.call(c10d.all_reduce.default, x, "sum", "g"))
    graph = draft.give(draft.call(aten.sin.default, x))
    before = written(graph)
    wait_late(graph, launches_in(graph))
    assert written(graph) == before


def test_items_of_a_list_are_waited_for_one_by_one() -> None:
    draft = Draft()
    x, y = draft.given("x", 4), draft.given("y", 2)
    launch = draft.call(c10d.all_reduce_coalesced.default, [x, y], "sum", "g")
    waits = [draft.call(WAIT, draft.call(operator.getitem, launch, at)) for at in range(2)]
    middle = draft.call(aten.sin.default, y)
    graph = draft.give(waits[0], draft.call(aten.add.Tensor, waits[1], middle))
    wait_late(graph, launches_in(graph))
    graph.lint()
    assert written(graph) == [
        "all_reduce_coalesced = all_reduce_coalesced([x, y], sum, g)",
        "sin = sin(y)",
        "getitem = getitem(all_reduce_coalesced, 1)",
        "wait = wait(getitem)",
        "add = add(wait, sin)",
        "getitem1 = getitem(all_reduce_coalesced, 0)",
        "wait1 = wait(getitem1)",
        "output(wait1, add)",
    ]


def test_views_of_a_bucket_stay_behind_its_receive() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    x, y = draft.given("x", 2), draft.given("y", 2)
    schedule = encode_schedule(owner.buckets(), [0, 1])
    sent = draft.call(SEND, [x, y], None, owner.number, 0, schedule)
    draft.call(RECEIVE, [sent], owner.number)
    pieces = [draft.call(aten.slice.Tensor, sent, 0, at, at + 2) for at in (0, 2)]
    middle = draft.call(aten.sin.default, y)
    graph = draft.give(*pieces, middle)
    x_and_y = torch.randn(2), torch.randn(2)
    wait_late(graph, launches_in(graph))
    graph.lint()
    assert sorted(written(graph)[3:5]) == [
        "slice = slice(send_bucket, 0, 2, 4)",
        "slice1 = slice(send_bucket, 0, 0, 2)",
    ]
    assert written(graph)[:3] == [
        "send_bucket = send_bucket([x, y], None, A, 0)",
        "receive_buckets = receive_buckets([send_bucket], A)",
        "sin = sin(y)",
    ]
    for got, given in zip(run(graph, *x_and_y), x_and_y, strict=False):
        assert torch.equal(got, given)


# drop_copies


def _reduced(draft: Draft, *shape: int) -> fx.Node:
    return draft.call(WAIT, draft.call(c10d.all_reduce.default, draft.given("x", *shape), "sum", "g"))


def test_copies_that_are_handed_out_or_read_go() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    piece = draft.call(aten.slice.Tensor, waited, 0, 0, 4)
    copied = draft.call(aten.clone.default, draft.call(aten.reshape.default, piece, [2, 2]))
    again = draft.call(aten.clone.default, copied)
    rest = draft.call(aten.slice.Tensor, waited, 0, 4, 6)
    read = draft.call(aten.sin.default, draft.call(aten.clone.default, rest))
    graph = draft.give(again, read)
    assert drop_copies(graph, launches_in(graph)) == 3
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


def _of_an_input(draft: Draft, waited: fx.Node) -> list[fx.Node]:
    return [waited, draft.call(aten.clone.default, draft.given("y", 2))]


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
    for got, expected in zip(run(graph, x), numbers, strict=True):
        assert torch.equal(got, expected)


def test_of_two_copies_of_one_result_that_are_handed_out_one_stays() -> None:
    draft = Draft()
    waited = _reduced(draft, 6)
    graph = draft.give(*(draft.call(aten.clone.default, waited) for _ in range(2)))
    assert drop_copies(graph, launches_in(graph)) == 1
    graph.lint()
    lines = written(graph)
    assert lines[:3] == [
        "all_reduce = all_reduce(x, sum, g)",
        "wait = wait(all_reduce)",
        "clone = clone(wait)",
    ]
    assert lines[3] in ("output(wait, clone)", "output(clone, wait)")


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
    for got, expected in zip(run(graph, x), numbers, strict=True):
        assert torch.equal(got, expected)


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
