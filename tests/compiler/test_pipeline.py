"""All passes together: graphs before and after in each form, and the numbers they bring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.compiler.hand_graphs import Draft, HandOwner, assert_same, bucket, run, slot, written
from weft.compiler import PASSES, run_passes, settings
from weft.compiler.graphs import calls

aten = torch.ops.aten
Make = Callable[..., fx.Node]


@pytest.fixture(params=["buffers", "concat", "coalesced"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(settings, "form", request.param)
    return request.param


def two_layers(*, is_traced: bool = False) -> tuple[HandOwner, fx.Graph]:
    """The backward of two layers: the second one's gradients come first, and the rest goes on meanwhile."""
    owner = HandOwner("A", bucket(slot(3, 3), slot(2, 2, 3)), bucket(slot(1, 2), slot(0)))
    draft = Draft()
    mark: Make = draft.reduce if is_traced else draft.mark
    x, y = draft.given("x", 2, 3), draft.given("y", 2)
    third = mark(owner, 3, draft.call(aten.sum.dim_IntList, x, [0]))
    second = mark(owner, 2, draft.call(aten.sin.default, x))
    back = draft.call(aten.mul.Tensor, y, y)
    first = mark(owner, 1, draft.call(aten.cos.default, back))
    zeroth = mark(owner, 0, draft.call(aten.sum.default, back))
    return owner, draft.give(zeroth, first, second, third)


IN_BUFFERS = [
    "sum = sum(x, [0])",
    "sin = sin(x)",
    "send_bucket = send_bucket([sum, sin], None, A, 0)",
    "mul = mul(y, y)",
    "cos = cos(mul)",
    "sum1 = sum(mul)",
    "send_bucket1 = send_bucket([cos, sum1], send_bucket, A, 1)",
    "receive_buckets = receive_buckets([send_bucket, send_bucket1], A)",
    "slice = slice(send_bucket1, 0, 2, 3)",
    "reshape = reshape(slice, [])",
    "slice1 = slice(send_bucket1, 0, 0, 2)",
    "slice2 = slice(send_bucket, 0, 3, 9)",
    "reshape1 = reshape(slice2, [2, 3])",
    "slice3 = slice(send_bucket, 0, 0, 3)",
    "output(reshape, slice1, reshape1, slice3)",
]
CONCAT = [
    "begin_reduction = begin_reduction(A)",
    "sum = sum(x, [0])",
    "sin = sin(x)",
    "mul = mul(sum, 0.5)",
    "flatten = flatten(sin, 0, -1)",
    "mul1 = mul(flatten, 0.5)",
    "getitem = getitem(begin_reduction, 0)",
    "cat = cat([mul, mul1, getitem])",
    "all_reduce = all_reduce(cat, sum, group of A)",
    "mul2 = mul(y, y)",
    "cos = cos(mul2)",
    "sum1 = sum(mul2)",
    "mul3 = mul(cos, 0.5)",
    "reshape = reshape(sum1, [1])",
    "mul4 = mul(reshape, 0.5)",
    "getitem1 = getitem(begin_reduction, 1)",
    "cat1 = cat([mul3, mul4, getitem1])",
    "all_reduce1 = all_reduce(cat1, sum, group of A)",
]
COALESCED = [
    "begin_reduction = begin_reduction(A)",
    "sum = sum(x, [0])",
    "sin = sin(x)",
    "mul = mul(sum, 0.5)",
    "mul1 = mul(sin, 0.5)",
    "getitem = getitem(begin_reduction, 0)",
    "all_reduce_coalesced = all_reduce_coalesced([mul, mul1, getitem], sum, group of A)",
    "mul2 = mul(y, y)",
    "cos = cos(mul2)",
    "sum1 = sum(mul2)",
    "mul3 = mul(cos, 0.5)",
    "mul4 = mul(sum1, 0.5)",
    "getitem1 = getitem(begin_reduction, 1)",
    "all_reduce_coalesced1 = all_reduce_coalesced([mul3, mul4, getitem1], sum, group of A)",
]


@pytest.mark.parametrize("is_traced", [False, True])
def test_two_layers(form: str, is_traced: bool) -> None:
    """Launches are up where their gradients are, and all waits are behind the last of them."""
    lines = {"buffers": IN_BUFFERS, "concat": CONCAT, "coalesced": COALESCED}[form]
    owner, graph = two_layers(is_traced=is_traced)
    given = torch.randn(2, 3), torch.randn(2)
    before = run(graph, *given)
    owner.heard.clear()
    work = run_passes(graph)
    graph.lint()
    got = written(graph)
    assert got[: len(lines)] == lines
    assert work.num_buckets == len(work.launches()) == 2
    assert not [line for line in got[: len(lines)] if "wait" in line]
    assert_same(run(graph, *given), before)
    if form == "buffers":
        assert owner.heard == ["open [3, 2, 1, 0]", "send 0", "send 1", "receive"]
    else:
        assert owner.heard == ["begin [3, 2, 1, 0]", "end"]
        assert [marks.tolist() for marks in owner.ends] == [[1, 2, 3], [1, 2, 3]]


def test_one_bucket_by_concatenation_to_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "form", "concat")
    owner = HandOwner("A", bucket(slot(0, 2, 2), slot(1, 3)))
    draft = Draft()
    x, y = draft.given("x", 2, 2), draft.given("y", 3)
    marks = draft.mark(owner, 0, x), draft.mark(owner, 1, y)
    graph = draft.give(*marks, draft.call(aten.sin.default, x))
    run_passes(graph)
    assert written(graph) == [
        "begin_reduction = begin_reduction(A)",
        "flatten = flatten(x, 0, -1)",
        "mul = mul(flatten, 0.5)",
        "mul1 = mul(y, 0.5)",
        "getitem = getitem(begin_reduction, 0)",
        "cat = cat([mul, mul1, getitem])",
        "all_reduce = all_reduce(cat, sum, group of A)",
        "sin = sin(x)",
        "wait = wait(all_reduce)",
        "slice = slice(wait, 0, 7, 10)",
        "end_reduction = end_reduction([slice], A)",
        "slice1 = slice(wait, 0, 4, 7)",
        "slice2 = slice(wait, 0, 0, 4)",
        "reshape = reshape(slice2, [2, 2])",
        "output(reshape, slice1, sin)",
    ]


@pytest.mark.usefixtures("form")
def test_buckets_are_launched_in_the_owners_order() -> None:
    """Also where the graph completes the second bucket first: other ranks may have other graphs."""
    owner = HandOwner("A", bucket(slot(0, 2), slot(2, 2)), bucket(slot(1, 6)))
    draft = Draft()
    x, y = draft.given("x", 2), draft.given("y", 6)
    zeroth = draft.mark(owner, 0, draft.call(aten.sin.default, x))
    first = draft.mark(owner, 1, draft.call(aten.cos.default, y))
    graph = draft.give(zeroth, first, draft.mark(owner, 2, draft.call(aten.exp.default, x)))
    given = torch.randn(2), torch.randn(6)
    before = run(graph, *given)
    launches = run_passes(graph).launches()
    assert_same(run(graph, *given), before)
    assert [_numel(launch) for launch in launches] == [4 + 3, 6 + 2]


def _numel(launch: fx.Node) -> int:
    value = launch.meta["val"]
    return sum(one.numel() for one in value) if isinstance(value, list) else value.numel()


@pytest.mark.usefixtures("form")
def test_a_hook_of_the_users_is_the_owners_to_call() -> None:
    owner = HandOwner("A", bucket(slot(0, 2)), is_plain=False, has_marks=False)
    draft = Draft()
    graph = draft.give(draft.mark(owner, 0, draft.given("x", 2)))
    run_passes(graph)
    run(graph, torch.randn(2))
    assert owner.heard == ["open [0]", "send 0", "receive"]


def test_a_narrow_wire_rounds_once(form: str) -> None:
    """In buffers the owner's hook narrows, here not at all."""
    owner = HandOwner("A", bucket(slot(0, 64)), dtype=torch.float16, has_marks=False)
    draft = Draft()
    graph = draft.give(draft.mark(owner, 0, draft.given("x", 64)))
    run_passes(graph)
    given = torch.randn(64)
    (got,) = run(graph, given)
    assert got.dtype == torch.float32
    assert torch.equal(got, given if form == "buffers" else given.half().float())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_buckets", [1, 2])
def test_a_gradient_that_is_used_in_the_middle(num_buckets: int) -> None:
    """A traced hook of the user's reads the mean before the other gradients are there."""
    places = slot(0, 2), slot(1, 2)
    owner = HandOwner("A", *([bucket(*places)] if num_buckets == 1 else map(bucket, places)))
    draft = Draft()
    x = draft.given("x", 2)
    mean = draft.reduce(owner, 0, draft.call(aten.sin.default, x))
    doubled = draft.call(aten.mul.Tensor, mean, 2)
    graph = draft.give(doubled, draft.reduce(owner, 1, draft.call(aten.cos.default, x)))
    given = torch.randn(2)
    before = run(graph, given)
    run_passes(graph)
    assert_same(run(graph, given), before)


@pytest.mark.usefixtures("form")
def test_a_copy_of_a_mean_goes() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    x = draft.given("x", 2)
    marks = [draft.mark(owner, 0, x), draft.mark(owner, 1, draft.call(aten.sin.default, x))]
    graph = draft.give(*(draft.call(aten.clone.default, mark) for mark in marks))
    given = torch.randn(2)
    before = run(graph, given)
    run_passes(graph)
    assert_same(run(graph, given), before)
    assert not calls(graph, aten.clone.default)


def test_a_graph_without_marks_stays_as_it_is() -> None:
    draft = Draft()
    x = draft.given("x", 2)
    graph = draft.give(draft.call(aten.clone.default, draft.call(aten.sin.default, x)))
    before = written(graph)
    work = run_passes(graph)
    assert (work.found, work.num_buckets, written(graph)) == ([], 0, before)


def test_the_last_pass_verifies() -> None:
    assert [name for name, _ in PASSES] == [
        "find_gradients",
        "bucket_gradients",
        "bucket_gathers",
        "bucket_scatters",
        "pace_shards",
        "launch_early",
        "wait_late",
        "drop_copies",
        "make_in_place",
        "verify",
    ]


def test_how_many_buckets_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters["inductor"], "ddp_buckets", 77)
    owner, graph = two_layers()
    run_passes(fx.Graph())
    assert counters["inductor"]["ddp_buckets"] == 77
    run_passes(graph)
    assert counters["inductor"]["ddp_buckets"] == len(owner.buckets()) == 2
