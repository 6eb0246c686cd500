"""Marks on gradients: how they come into a graph, and how the pipeline finds them."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.compiler.hand_graphs import Draft, HandOwner, bucket, run, slot, written
from weft.compiler.ops import Marked
from weft.compiler.passes.find_marks import find_reducible
from weft.compiler.passes.mark_parameters import mark_parameters
from weft.compiler.schedule import Wire
from weft.errors import StateError

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


# mark_parameters


class Scene:
    """A forward as Dynamo leaves it: its inputs know the tensors that they were traced with."""

    def __init__(self, **inputs: Tensor) -> None:
        self.graph = fx.Graph()
        self.inputs = {name: self.graph.placeholder(name) for name in inputs}
        for name, tensor in inputs.items():
            self.inputs[name].meta.update(grapharg=SimpleNamespace(example=tensor), example_value=tensor)

    def multiply(self, *pairs: tuple[str, str]) -> list[fx.Node]:
        return [
            self.graph.call_function(torch.mul, (self.inputs[one], self.inputs[other]))
            for one, other in pairs
        ]


def test_marks_stand_behind_the_inputs_and_all_readers_read_them() -> None:
    a, b, x = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.ones(2)
    owner = HandOwner("A")
    owner.params = [(0, a), (3, nn.Parameter(torch.ones(5))), (7, b)]
    scene = Scene(a=a, x=x, b=b)
    scene.graph.output(tuple(scene.multiply(("a", "x"), ("b", "a"))))
    assert written(scene.graph) == ["mul = mul(a, x)", "mul1 = mul(b, a)", "output(mul, mul1)"]
    mark_parameters(scene.graph, [owner.number, owner.number])
    scene.graph.lint()
    assert written(scene.graph) == [
        f"apply = apply({owner.number}, {owner.wire}, [0, 7], a, b)",
        "getitem = getitem(apply, 0)",
        "getitem1 = getitem(apply, 1)",
        "mul = mul(getitem, x)",
        "mul1 = mul(getitem1, getitem)",
        "output(mul, mul1)",
    ]
    assert [node.meta["example_value"] for node in scene.graph.nodes if node.target is operator.getitem] == [
        a,
        b,
    ]


def test_what_owners_do_not_have_is_not_marked() -> None:
    owner, idle = HandOwner("A"), HandOwner("B")
    owner.params = [(0, nn.Parameter(torch.ones(2)))]
    scene = Scene(x=torch.ones(2), y=torch.ones(2))
    scene.graph.output(tuple(scene.multiply(("x", "y"))))
    before = written(scene.graph)
    mark_parameters(scene.graph, [owner.number, idle.number])
    mark_parameters(scene.graph, [])
    assert written(scene.graph) == before


def test_a_parameter_that_is_handed_out_and_one_of_two_owners() -> None:
    both, mine = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    inner, outer = HandOwner("inner"), HandOwner("outer")
    inner.params, outer.params = [(0, both)], [(0, mine), (1, both)]
    scene = Scene(both=both, mine=mine)
    scene.graph.output((*scene.multiply(("both", "mine")), scene.inputs["mine"]))
    mark_parameters(scene.graph, [inner.number, outer.number])
    scene.graph.lint()
    assert written(scene.graph) == [
        f"apply = apply({outer.number}, {outer.wire}, [0, 1], mine, both)",
        "getitem = getitem(apply, 0)",
        "getitem1 = getitem(apply, 1)",
        f"apply1 = apply({inner.number}, {inner.wire}, [0], getitem1)",
        "getitem2 = getitem(apply1, 0)",
        "mul = mul(getitem2, getitem)",
        "output(mul, getitem)",
    ]


def test_marked_parameters_are_as_they_were_and_so_are_their_gradients() -> None:
    owner = HandOwner("A")
    a, b, unused = (nn.Parameter(torch.randn(2, 3)) for _ in range(3))
    marked_a, marked_b, _ = Marked.apply(owner.number, owner.wire, [0, 1, 2], a, b, unused)  # type: ignore[misc]
    assert torch.equal(marked_a, a)
    assert marked_a.data_ptr() == a.data_ptr()
    (marked_a * marked_b).sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b.detach())
    assert unused.grad is None
    assert owner.heard == ["leave", "leave"]


def test_an_owner_that_was_dropped() -> None:
    owner = HandOwner("A")
    number = owner.number
    del owner
    with pytest.raises(StateError, match="Keep the module"):
        mark_parameters(fx.Graph(), [number])


# find_marks


def test_all_gradients_of_an_owner_are_found_in_any_order() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 3)), bucket(slot(2), dtype=torch.float64))
    draft = Draft()
    a, b, c = draft.given("a", 2), draft.given("b", 3), draft.given("c", dtype=torch.float64)
    marks = [draft.mark(owner, 2, c), draft.mark(owner, 0, a), draft.mark(owner, 1, b)]
    graph = draft.give(*marks)
    before = written(graph)
    (found,) = find_reducible(graph)
    assert found.owner == owner.number
    assert found.wire == Wire.decode(owner.wire)
    assert found.buckets == list(owner.buckets())
    assert found.marks == {2: marks[0], 0: marks[1], 1: marks[2]}
    assert written(graph) == before


def test_a_missing_gradient_leaves_the_others_to_the_owner() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 3)))
    draft = Draft()
    made = draft.call(aten.sin.default, draft.given("a", 2))
    graph = draft.give(draft.call(aten.cos.default, draft.mark(owner, 0, made)))
    assert find_reducible(graph) == []
    assert written(graph) == [
        "sin = sin(a)",
        "leave_gradients = leave_gradients(sin, A)",
        "cos = cos(sin)",
        "output(cos)",
    ]
    graph.lint()
    graph.eliminate_dead_code()
    assert "leave_gradients = leave_gradients(sin, A)" in written(graph)
    run(graph, torch.ones(2))
    assert owner.heard == ["leave"]


ODD = {
    "another shape": ((3, 2), torch.float32, (0,)),
    "another dtype": ((2, 3), torch.float16, (0,)),
    "a gradient twice": ((2, 3), torch.float32, (0, 0)),
    "a parameter that is in no bucket": ((2, 3), torch.float32, (0, 1)),
}


@pytest.mark.parametrize(("shape", "dtype", "indices"), ODD.values(), ids=ODD.keys())
def test_gradients_that_do_not_fit_are_left(
    shape: tuple[int, ...], dtype: torch.dtype, indices: tuple[int, ...]
) -> None:
    owner = HandOwner("A", bucket(slot(0, 2, 3)))
    draft = Draft()
    given = draft.given("a", *shape, dtype=dtype)
    graph = draft.give(*(draft.mark(owner, index, given) for index in indices))
    assert find_reducible(graph) == []
    outputs = ", ".join("a" for _ in indices)
    assert written(graph) == ["leave_gradients = leave_gradients(a, A)", f"output({outputs})"]


def test_a_gradient_that_nobody_knows_is_left() -> None:
    owner = HandOwner("A", bucket(slot(0, 2)))
    draft = Draft()
    mark = draft.mark(owner, 0, draft.given("a", 2))
    del mark.meta["val"]
    graph = draft.give(mark)
    assert find_reducible(graph) == []


def test_one_owner_is_whole_and_another_is_not() -> None:
    whole, part, none = (
        HandOwner("whole", bucket(slot(0, 2))),
        HandOwner("part", bucket(slot(0, 2), slot(1, 2))),
        HandOwner("none"),
    )
    draft = Draft()
    a = draft.given("a", 2)
    graph = draft.give(draft.mark(part, 0, a), draft.mark(whole, 0, a), draft.mark(none, 0, a))
    assert [found.owner for found in find_reducible(graph)] == [whole.number]
    assert written(graph) == [
        "leave_gradients = leave_gradients(a, part)",
        "leave_gradients1 = leave_gradients(a, none)",
        "mark_gradient = mark_gradient(a, whole, 0)",
        "output(a, mark_gradient, a)",
    ]


def test_owners_come_in_the_order_of_their_first_gradients() -> None:
    one, two = HandOwner("one", bucket(slot(0, 2), slot(1, 2))), HandOwner("two", bucket(slot(0, 2)))
    draft = Draft()
    a = draft.given("a", 2)
    graph = draft.give(draft.mark(two, 0, a), draft.mark(one, 1, a), draft.mark(one, 0, a))
    assert [found.owner for found in find_reducible(graph)] == [two.number, one.number]


def test_what_compiled_autograd_traced_stands_for_the_marks_and_is_never_left() -> None:
    whole, part = HandOwner("whole", bucket(slot(0, 2))), HandOwner("part", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    a = draft.given("a", 2)
    reduces = [draft.reduce(whole, 0, draft.mark(whole, 0, a)), draft.reduce(part, 1, draft.mark(part, 1, a))]
    graph = draft.give(*reduces)
    (found,) = find_reducible(graph)
    assert found.marks == {0: reduces[0]}
    assert written(graph) == [
        "reduce_gradient = reduce_gradient(a, part, 1)",
        "reduce_gradient1 = reduce_gradient(a, whole, 0)",
        "output(reduce_gradient1, reduce_gradient)",
    ]


def test_marks_and_what_reads_them_go_behind_all_gradients() -> None:
    owner = HandOwner("A", bucket(slot(0, 2), slot(1, 2)))
    draft = Draft()
    a = draft.given("a", 2)
    first = draft.mark(owner, 0, draft.call(aten.sin.default, a))
    doubled = draft.call(aten.mul.Tensor, first, 2)
    made = draft.call(aten.cos.default, a)
    summed = draft.call(aten.add.Tensor, doubled, made)
    graph = draft.give(summed, draft.mark(owner, 1, draft.call(aten.exp.default, made)))
    assert len(find_reducible(graph)) == 1
    graph.lint()
    assert written(graph) == [
        "sin = sin(a)",
        "cos = cos(a)",
        "exp = exp(cos)",
        "mark_gradient = mark_gradient(sin, A, 0)",
        "mul = mul(mark_gradient, 2)",
        "add = add(mul, cos)",
        "mark_gradient1 = mark_gradient(exp, A, 1)",
        "output(add, mark_gradient1)",
    ]
