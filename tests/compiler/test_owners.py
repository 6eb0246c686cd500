"""Several owners in one graph, and those that have a part of their gradients there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.compiler.hand_graphs import Draft, HandOwner, assert_same, bucket, run, slot
from weft.compiler import run_passes, settings
from weft.compiler.graphs import calls
from weft.compiler.ops import MARK, REDUCE

aten = torch.ops.aten
Make = Callable[..., fx.Node]


@pytest.fixture(params=["buffers", "concat", "coalesced"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(settings, "form", request.param)
    return request.param


@pytest.mark.parametrize("is_traced", [False, True])
def test_two_owners_in_one_graph(form: str, is_traced: bool) -> None:
    one, two = HandOwner("one", bucket(slot(0, 2), slot(1, 2))), HandOwner("two", bucket(slot(0, 2)))
    draft = Draft()
    mark: Make = draft.reduce if is_traced else draft.mark
    x = draft.given("x", 2)
    graph = draft.give(
        mark(one, 1, draft.call(aten.sin.default, x)),
        mark(two, 0, draft.call(aten.cos.default, x)),
        mark(one, 0, draft.call(aten.exp.default, x)),
    )
    given = torch.randn(2)
    before = run(graph, given)
    one.heard.clear()
    two.heard.clear()
    work = run_passes(graph)
    assert [found.owner for found in work.found] == [one.number, two.number]
    assert work.num_buckets == 2
    assert_same(run(graph, given), before)
    if form == "buffers":
        assert (one.heard, two.heard) == (
            ["open [1, 0]", "send 0", "receive"],
            ["open [0]", "send 0", "receive"],
        )
    else:
        assert (one.heard, two.heard) == (["begin [1, 0]", "end"], ["begin [0]", "end"])


@pytest.mark.usefixtures("form")
def test_a_gradient_of_an_owner_inside_another() -> None:
    """What one has reduced is the other's gradient."""
    inner, outer = HandOwner("inner", bucket(slot(0, 2))), HandOwner("outer", bucket(slot(0, 2)))
    draft = Draft()
    graph = draft.give(draft.mark(outer, 0, draft.mark(inner, 0, draft.given("x", 2))))
    given = torch.randn(2)
    run_passes(graph)
    assert_same(run(graph, given), [given])
    assert len(inner.heard) == len(outer.heard) >= 2


@pytest.mark.usefixtures("form")
def test_one_owner_is_left_and_another_reduced() -> None:
    whole, part = HandOwner("whole", bucket(slot(0, 2))), HandOwner("part", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    x = draft.given("x", 2)
    graph = draft.give(draft.mark(whole, 0, x), draft.mark(part, 1, x))
    work = run_passes(graph)
    given = torch.randn(2)
    assert_same(run(graph, given), [given, given])
    assert part.heard == ["leave"]
    assert whole.heard[-1] in ("receive", "end")
    assert work.num_buckets == 1
    assert not calls(graph, MARK)


def test_a_part_that_compiled_autograd_traced_reduces_one_by_one() -> None:
    part = HandOwner("part", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    graph = draft.give(draft.reduce(part, 1, draft.given("x", 2)))
    assert run_passes(graph).found == []
    assert len(calls(graph, REDUCE)) == 1
    run(graph, torch.randn(2))
    assert part.heard == ["reduce 1"]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_traced", [False, True])
def test_an_owner_whose_gradients_come_in_part_from_another(is_traced: bool) -> None:
    """The outer one has a gradient of its own first, and then one that the inner one reduces before."""
    inner, outer = HandOwner("inner", bucket(slot(0, 3))), HandOwner("outer", bucket(slot(0, 2), slot(1, 3)))
    draft = Draft()
    mark: Make = draft.reduce if is_traced else draft.mark
    x, y = draft.given("x", 2), draft.given("y", 3)
    own = mark(outer, 0, draft.call(aten.sin.default, x))
    shared = mark(inner, 0, draft.call(aten.cos.default, y))
    graph = draft.give(own, mark(outer, 1, draft.call(aten.mul.Tensor, shared, 3)))
    given = torch.randn(2), torch.randn(3)
    before = run(graph, *given)
    run_passes(graph)
    assert_same(run(graph, *given), before)


@pytest.mark.usefixtures("form")
def test_two_owners_that_need_each_other_do_not_both_reduce() -> None:
    one, two = (HandOwner(label, bucket(slot(0, 2), slot(1, 2))) for label in ("one", "two"))
    draft = Draft()
    x = draft.given("x", 2)
    first = draft.mark(one, 0, x)
    second = draft.mark(two, 0, draft.call(aten.sin.default, first))
    third = draft.mark(one, 1, draft.call(aten.cos.default, second))
    graph = draft.give(first, second, third, draft.mark(two, 1, third))
    given = torch.randn(2)
    before = run(graph, given)
    run_passes(graph)
    assert_same(run(graph, given), before)
    assert "leave" in one.heard


@pytest.mark.usefixtures("form")
def test_a_gradient_that_needs_another_of_the_same_owner_leaves_both() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    first = draft.mark(owner, 0, draft.given("x", 2))
    graph = draft.give(first, draft.mark(owner, 1, draft.call(aten.sin.default, first)))
    given = torch.randn(2)
    before = run(graph, given)
    owner.heard.clear()
    assert run_passes(graph).found == []
    assert_same(run(graph, given), before)
    assert owner.heard == ["leave"]
