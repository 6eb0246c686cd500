"""Launches go up and waits go down: a graph before, the graph after, line by line."""

from __future__ import annotations

import operator

import torch

from tests.compiler.hand_graphs import Draft, HandOwner, bucket, run, slot, written
from weft.compiler.graphs import WAIT, c10d
from weft.compiler.ops import RECEIVE, SEND
from weft.compiler.passes.launch_early import launch_early, launches_in
from weft.compiler.passes.wait_late import wait_late
from weft.compiler.schedule import encode_schedule

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


# launch_early


def test_a_launch_goes_up_with_its_packing() -> None:
    draft = Draft()
    x, y = draft.given("x", 2, 3), draft.given("y", 3)
    a = draft.call(aten.sin.default, x)
    b = draft.call(aten.cos.default, y)
    later = draft.call(aten.exp.default, y)
    turned = draft.call(aten.flatten.using_ints, draft.call(aten.permute.default, a, [1, 0]), 0, -1)
    half = draft.call(CONVERT, draft.call(aten.div.Tensor, turned, 2), torch.float16)
    other = draft.call(CONVERT, draft.call(aten.mul.Tensor, b, 0.5), torch.float16)
    launch = draft.call(c10d.all_reduce.default, draft.call(aten.cat.default, [half, other]), "sum", "g")
    graph = draft.give(draft.call(WAIT, launch), later)
    launch_early(graph, launches_in(graph))
    graph.lint()
    assert written(graph) == [
        "sin = sin(x)",
        "cos = cos(y)",
        "permute = permute(sin, [1, 0])",
        "flatten = flatten(permute, 0, -1)",
        "div = div(flatten, 2)",
        "convert = convert(div, torch.float16)",
        "mul = mul(cos, 0.5)",
        "convert1 = convert(mul, torch.float16)",
        "cat = cat([convert, convert1])",
        "all_reduce = all_reduce(cat, sum, g)",
        "exp = exp(y)",
        "wait = wait(all_reduce)",
        "output(wait, exp)",
    ]


def test_packing_that_another_reads_stays_where_it_is() -> None:
    draft = Draft()
    x = draft.given("x", 2)
    halved = draft.call(aten.mul.Tensor, x, 0.5)
    other = draft.call(aten.exp.default, halved)
    shared = draft.call(aten.mul.Tensor, other, 3)
    packed = draft.call(aten.cat.default, [shared, halved])
    read = draft.call(aten.cos.default, shared)
    launch = draft.call(c10d.all_reduce.default, packed, "sum", "g")
    graph = draft.give(draft.call(WAIT, launch), read)
    launch_early(graph, launches_in(graph))
    graph.lint()
    assert written(graph) == [
        "mul = mul(x, 0.5)",
        "exp = exp(mul)",
        "mul1 = mul(exp, 3)",
        "cat = cat([mul1, mul])",
        "all_reduce = all_reduce(cat, sum, g)",
        "cos = cos(mul1)",
        "wait = wait(all_reduce)",
        "output(wait, cos)",
    ]


def test_launches_of_inputs_stand_behind_all_inputs_and_keep_their_order() -> None:
    draft = Draft()
    x, y, z = draft.given("x", 2), draft.given("y", 2), draft.given("z", 2)
    late = draft.call(aten.sin.default, y)
    first = draft.call(c10d.all_reduce.default, late, "sum", "first")
    second = draft.call(c10d.all_reduce.default, x, "sum", "second")
    third = draft.call(c10d.all_reduce_coalesced.default, [x, z], "sum", "third")
    items = [draft.call(operator.getitem, third, at) for at in range(2)]
    graph = draft.give(*(draft.call(WAIT, node) for node in (first, second, *items)))
    launch_early(graph, launches_in(graph))
    graph.lint()
    assert written(graph)[:4] == [
        "sin = sin(y)",
        "all_reduce = all_reduce(sin, sum, first)",
        "all_reduce1 = all_reduce(x, sum, second)",
        "all_reduce_coalesced = all_reduce_coalesced([x, z], sum, third)",
    ]

    launch_early(graph, [node for node in launches_in(graph) if node.args[2] != "first"])
    graph.lint()
    assert [line.split(" = ")[0] for line in written(graph)][:4] == [
        "all_reduce",
        "all_reduce_coalesced",
        "sin",
        "all_reduce1",
    ]


def test_sends_go_up_and_keep_their_order() -> None:
    owner = HandOwner("A", bucket(slot(0, 2)), bucket(slot(1, 2)))
    schedule = encode_schedule(owner.buckets(), [1, 0])
    draft = Draft()
    x, y = draft.given("x", 2), draft.given("y", 2)
    early = draft.call(aten.sin.default, x)
    late = draft.call(aten.cos.default, y)
    rest = draft.call(aten.exp.default, late)
    first = draft.call(SEND, [late], None, owner.number, 0, schedule)
    draft.call(SEND, [early], first, owner.number, 1, schedule)
    graph = draft.give(rest)
    launch_early(graph, launches_in(graph))
    assert written(graph) == [
        "sin = sin(x)",
        "cos = cos(y)",
        "send_bucket = send_bucket([cos], None, A, 0)",
        "send_bucket1 = send_bucket([sin], send_bucket, A, 1)",
        "exp = exp(cos)",
        "output(exp)",
    ]


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
