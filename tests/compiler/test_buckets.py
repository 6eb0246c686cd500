"""Buckets of marked gradients in their three forms: graphs before and after, and the numbers they bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.compiler.hand_graphs import Draft, HandOwner, Lines, assert_same, bucket, run, slot, written
from weft.compiler import Slot
from weft.compiler.graphs import calls
from weft.compiler.ops import BEGIN, SEND
from weft.compiler.passes.bucket_gradients import (
    bucket_by_coalescing,
    bucket_by_concat,
    bucket_in_buffers,
)
from weft.compiler.passes.find_marks import Reducible, find_reducible
from weft.compiler.pipeline import FORMS
from weft.compiler.schedule import decode_schedule

aten = torch.ops.aten
Form = Callable[[fx.Graph, Reducible], int]
every_form = pytest.mark.parametrize("form", ["buffers", "concat", "coalesced"])


def two_buckets(**wire: Any) -> tuple[HandOwner, fx.Graph]:
    """Gradients 2, 1, 0 are made in this order; 1 and 2 share the first bucket."""
    owner = HandOwner("A", bucket(slot(1, 3), slot(2, 2, 3)), bucket(slot(0, 4)), **wire)
    draft = Draft()
    x, y, z = draft.given("x", 2, 3), draft.given("y", 3), draft.given("z", 4)
    second = draft.mark(owner, 2, draft.call(aten.sin.default, x))
    first = draft.mark(owner, 1, draft.call(aten.exp.default, y))
    zeroth = draft.mark(owner, 0, draft.call(aten.cos.default, z))
    return owner, draft.give(zeroth, first, second)


BEFORE = [
    "sin = sin(x)",
    "mark_gradient = mark_gradient(sin, A, 2)",
    "exp = exp(y)",
    "mark_gradient1 = mark_gradient(exp, A, 1)",
    "cos = cos(z)",
    "mark_gradient2 = mark_gradient(cos, A, 0)",
    "output(mark_gradient2, mark_gradient1, mark_gradient)",
]


def bucketed(graph: fx.Graph, form: Form) -> Lines:
    (found,) = find_reducible(graph)
    assert form(graph, found) == len(found.buckets)
    graph.lint()
    return written(graph)


def test_in_buffers() -> None:
    _, graph = two_buckets()
    assert written(graph) == BEFORE
    assert bucketed(graph, bucket_in_buffers) == [
        "sin = sin(x)",
        "exp = exp(y)",
        "cos = cos(z)",
        "send_bucket = send_bucket([exp, sin], None, A, 0)",
        "send_bucket1 = send_bucket([cos], send_bucket, A, 1)",
        "receive_buckets = receive_buckets([send_bucket, send_bucket1], A)",
        "slice = slice(send_bucket, 0, 0, 3)",
        "slice1 = slice(send_bucket, 0, 3, 9)",
        "reshape = reshape(slice1, [2, 3])",
        "slice2 = slice(send_bucket1, 0, 0, 4)",
        "output(slice2, slice, reshape)",
    ]
    for send in calls(graph, SEND):
        rooms, order = decode_schedule(send.args[4])  # type: ignore[arg-type]
        assert order == [2, 1, 0]
        assert [(room.num_gradients, room.num_marks) for room in rooms] == [(9, 3), (4, 2)]
    assert [send.meta["val"].numel() for send in calls(graph, SEND)] == [12, 6]


def test_by_concatenation() -> None:
    _, graph = two_buckets()
    assert bucketed(graph, bucket_by_concat) == [
        "begin_reduction = begin_reduction(A)",
        "sin = sin(x)",
        "exp = exp(y)",
        "cos = cos(z)",
        "getitem = getitem(begin_reduction, 0)",
        "mul = mul(exp, 0.5)",
        "flatten = flatten(sin, 0, -1)",
        "mul1 = mul(flatten, 0.5)",
        "cat = cat([mul, mul1, getitem])",
        "all_reduce = all_reduce(cat, sum, group of A)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 9, 12)",
        "slice1 = slice(wait, 0, 0, 3)",
        "slice2 = slice(wait, 0, 3, 9)",
        "reshape = reshape(slice2, [2, 3])",
        "getitem1 = getitem(begin_reduction, 1)",
        "mul2 = mul(cos, 0.5)",
        "cat1 = cat([mul2, getitem1])",
        "all_reduce1 = all_reduce(cat1, sum, group of A)",
        "wait1 = wait(all_reduce1)",
        "slice3 = slice(wait1, 0, 4, 6)",
        "slice4 = slice(wait1, 0, 0, 4)",
        "end_reduction = end_reduction([slice, slice3], A)",
        "output(slice4, slice1, reshape)",
    ]
    (begin,) = calls(graph, BEGIN)
    assert decode_schedule(begin.args[1])[1] == [2, 1, 0]  # type: ignore[arg-type]


def test_coalesced() -> None:
    _, graph = two_buckets()
    assert bucketed(graph, bucket_by_coalescing) == [
        "begin_reduction = begin_reduction(A)",
        "sin = sin(x)",
        "exp = exp(y)",
        "cos = cos(z)",
        "getitem = getitem(begin_reduction, 0)",
        "mul = mul(exp, 0.5)",
        "mul1 = mul(sin, 0.5)",
        "all_reduce_coalesced = all_reduce_coalesced([mul, mul1, getitem], sum, group of A)",
        "getitem1 = getitem(all_reduce_coalesced, 0)",
        "wait = wait(getitem1)",
        "getitem2 = getitem(all_reduce_coalesced, 1)",
        "wait1 = wait(getitem2)",
        "getitem3 = getitem(all_reduce_coalesced, 2)",
        "wait2 = wait(getitem3)",
        "getitem4 = getitem(begin_reduction, 1)",
        "mul2 = mul(cos, 0.5)",
        "all_reduce_coalesced1 = all_reduce_coalesced([mul2, getitem4], sum, group of A)",
        "getitem5 = getitem(all_reduce_coalesced1, 0)",
        "wait3 = wait(getitem5)",
        "getitem6 = getitem(all_reduce_coalesced1, 1)",
        "wait4 = wait(getitem6)",
        "end_reduction = end_reduction([wait2, wait4], A)",
        "output(wait3, wait, wait1)",
    ]


def test_a_narrow_wire_by_concatenation() -> None:
    owner = HandOwner("A", bucket(slot(0, 2, 2)), dtype=torch.float16, has_marks=False)
    draft = Draft()
    graph = draft.give(draft.mark(owner, 0, draft.given("x", 2, 2)))
    assert bucketed(graph, bucket_by_concat) == [
        "begin_reduction = begin_reduction(A)",
        "flatten = flatten(x, 0, -1)",
        "div = div(flatten, 2)",
        "convert = convert(div, torch.float16)",
        "cat = cat([convert])",
        "all_reduce = all_reduce(cat, sum, group of A)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 3, 4)",
        "convert1 = convert(wait, torch.float32)",
        "slice1 = slice(convert1, 0, 0, 4)",
        "reshape = reshape(slice1, [2, 2])",
        "getitem = getitem(begin_reduction, 0)",
        "end_reduction = end_reduction([slice, getitem], A)",
        "output(reshape)",
    ]


def test_a_narrow_wire_coalesced() -> None:
    owner = HandOwner("A", bucket(slot(0, 2, 2), slot(1, 3)), dtype=torch.float16, has_marks=False)
    draft = Draft()
    x, y = draft.given("x", 2, 2), draft.given("y", 3)
    graph = draft.give(draft.mark(owner, 0, x), draft.mark(owner, 1, y))
    assert bucketed(graph, bucket_by_coalescing) == [
        "begin_reduction = begin_reduction(A)",
        "div = div(x, 2)",
        "convert = convert(div, torch.float16)",
        "div1 = div(y, 2)",
        "convert1 = convert(div1, torch.float16)",
        "all_reduce_coalesced = all_reduce_coalesced([convert, convert1], sum, group of A)",
        "getitem = getitem(all_reduce_coalesced, 0)",
        "wait = wait(getitem)",
        "getitem1 = getitem(all_reduce_coalesced, 1)",
        "wait1 = wait(getitem1)",
        "convert2 = convert(wait, torch.float32)",
        "convert3 = convert(wait1, torch.float32)",
        "getitem2 = getitem(begin_reduction, 0)",
        "end_reduction = end_reduction([wait1, getitem2], A)",
        "output(convert2, convert3)",
    ]


owners: list[HandOwner] = []  # graphs hold owners by number only, and these are made on the way
CHANNELS_LAST = slot(0, 2, 3, 2, 2, strides=(12, 1, 6, 3))


def one_gradient(place: Slot) -> fx.Graph:
    owner = HandOwner("A", bucket(place), has_marks=False)
    owners.append(owner)
    draft = Draft()
    return draft.give(draft.mark(owner, 0, draft.given("x", *place.shape, strides=place.strides)))


def test_channels_last_gradients_lie_in_the_bucket_as_they_lie() -> None:
    graph = one_gradient(CHANNELS_LAST)
    assert bucketed(graph, bucket_by_concat)[1:6] == [
        "permute = permute(x, [0, 2, 3, 1])",
        "flatten = flatten(permute, 0, -1)",
        "mul = mul(flatten, 0.5)",
        "cat = cat([mul])",
        "all_reduce = all_reduce(cat, sum, group of A)",
    ]
    assert written(graph)[8:11] == [
        "slice1 = slice(wait, 0, 0, 24)",
        "reshape = reshape(slice1, [2, 2, 2, 3])",
        "permute1 = permute(reshape, [0, 3, 1, 2])",
    ]


def test_gradients_of_no_dimensions() -> None:
    assert bucketed(one_gradient(slot(0)), bucket_by_concat) == [
        "begin_reduction = begin_reduction(A)",
        "reshape = reshape(x, [1])",
        "mul = mul(reshape, 0.5)",
        "cat = cat([mul])",
        "all_reduce = all_reduce(cat, sum, group of A)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 0, 1)",
        "slice1 = slice(wait, 0, 0, 1)",
        "reshape1 = reshape(slice1, [])",
        "getitem = getitem(begin_reduction, 0)",
        "end_reduction = end_reduction([slice, getitem], A)",
        "output(reshape1)",
    ]
    assert bucketed(one_gradient(slot(0)), bucket_in_buffers)[-3:] == [
        "slice = slice(send_bucket, 0, 0, 1)",
        "reshape = reshape(slice, [])",
        "output(reshape)",
    ]


# Numbers


PLACES = {
    "plain": slot(0, 2, 3),
    "no dimensions": slot(0),
    "one dimension": slot(0, 5),
    "one element": slot(0, 1, 1, 1),
    "empty": slot(0, 0, 3),
    "transposed": slot(0, 3, 4, strides=(1, 3)),
    "channels last": CHANNELS_LAST,
    "channels last, 1x1": slot(0, 4, 3, 1, 1, strides=(3, 1, 3, 3)),
    "channels last 3d": slot(0, 2, 3, 2, 2, 2, strides=(24, 1, 12, 6, 3)),
}


@every_form
@pytest.mark.parametrize("lies", ["as the parameter", "contiguous"])
@pytest.mark.parametrize("middle", PLACES.values(), ids=PLACES.keys())
def test_a_gradient_comes_back_as_it_was(middle: Slot, lies: str, form: str) -> None:
    """Its strides are the parameter's; coalesced, they are the gradient's own."""
    owner = HandOwner("A", bucket(slot(1, 2), middle, slot(2, 1)))
    strides = middle.strides if lies == "as the parameter" else None
    draft = Draft()
    x = draft.given("x", *middle.shape, strides=strides)
    side = draft.given("side", 2), draft.given("end", 1)
    graph = draft.give(draft.mark(owner, 1, side[0]), draft.mark(owner, 0, x), draft.mark(owner, 2, side[1]))
    given = [torch.randn(2), torch.randn(middle.shape), torch.randn(1)]
    if strides is not None:
        given[1] = torch.empty_strided(middle.shape, strides).copy_(given[1])
    before = [*given]
    bucketed(graph, FORMS[form])
    results = run(graph, given[1], given[0], given[2])
    assert_same(results, before)
    if form != "coalesced" and middle.numel > 1:
        assert _moving(results[1]) == _moving(torch.empty_strided(middle.shape, middle.strides))


def _moving(tensor: Tensor) -> list[int]:
    """Strides of dimensions that have more than one element: those of others mean nothing."""
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
