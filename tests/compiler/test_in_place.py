"""Gradients that are products are made in their bucket: the graph before and after, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.compiler.hand_graphs import Draft, HandOwner, assert_same, bucket, run, slot, written
from weft.compiler import LARGE_NUMEL, run_passes
from weft.compiler.graphs import calls
from weft.compiler.ops import ADD_ROWS, MULTIPLY, OPEN, SEND, add_rows_into, multiply_into
from weft.compiler.passes.verify import verify
from weft.errors import InternalError

aten = torch.ops.aten
ROWS, COLS = 130, 128  # a product of this size is large
WIDE = {"x": (8, ROWS), "y": (8, COLS), "plus": (ROWS, COLS)}


def drafted() -> tuple[Draft, dict[str, fx.Node]]:
    draft = Draft()
    return draft, {name: draft.given(name, *shape) for name, shape in WIDE.items()}


def made(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in WIDE.values()]


def product(draft: Draft, given: dict[str, fx.Node]) -> fx.Node:
    return draft.call(aten.mm.default, draft.call(aten.t.default, given["x"]), given["y"])


def test_the_graph_before_and_after() -> None:
    owner = HandOwner("A", bucket(slot(1, ROWS, COLS), slot(0, 3)), bucket(slot(2, COLS, ROWS)))
    draft, given = drafted()
    small = draft.given("z", 3)
    turned = draft.call(aten.t.default, product(draft, given))
    summed = draft.call(aten.addmm.default, given["plus"], draft.call(aten.t.default, given["x"]), given["y"])
    marks = [draft.mark(owner, 0, draft.call(aten.sin.default, small))]
    marks += [draft.mark(owner, 1, summed), draft.mark(owner, 2, turned)]
    graph = draft.give(*marks)
    inputs = [*made(), torch.randn(3)]
    x, y, plus, z = inputs
    run_passes(graph)
    assert written(graph) == [
        "t = t(x)",
        "open_buckets = open_buckets(A)",
        "multiply_in_place = multiply_in_place(None, t, y, True, open_buckets, A, 1, 0)",
        "t1 = t(x)",
        "multiply_in_place1 = multiply_in_place(plus, t1, y, False, open_buckets, A, 0, 0)",
        "sin = sin(z)",
        "send_bucket = send_bucket([multiply_in_place1, sin], open_buckets, A, 0)",
        "send_bucket1 = send_bucket([multiply_in_place], send_bucket, A, 1)",
        "receive_buckets = receive_buckets([send_bucket, send_bucket1], A)",
        "slice = slice(send_bucket1, 0, 0, 16640)",
        "reshape = reshape(slice, [128, 130])",
        "slice1 = slice(send_bucket, 0, 16640, 16643)",
        "slice2 = slice(send_bucket, 0, 0, 16640)",
        "reshape1 = reshape(slice2, [130, 128])",
        "output(slice1, reshape1, reshape)",
    ]
    results = run(graph, *inputs)
    assert_same(results, [z.sin(), torch.addmm(plus, x.t(), y), (x.t() @ y).t().contiguous()])
    assert owner.heard == ["open [2, 1, 0]", "place 0 of 1", "place 0 of 0", "send 0", "send 1", "receive"]


def test_the_first_bucket_is_sent_before_anything_is_made_in_place() -> None:
    owner = HandOwner("A", bucket(slot(0, 3)), bucket(slot(1, ROWS, COLS)))
    draft, given = drafted()
    small = draft.call(aten.sin.default, draft.given("z", 3))
    graph = draft.give(draft.mark(owner, 0, small), draft.mark(owner, 1, product(draft, given)))
    run_passes(graph)
    assert written(graph)[:5] == [
        "sin = sin(z)",
        "open_buckets = open_buckets(A)",
        "send_bucket = send_bucket([sin], open_buckets, A, 0)",
        "t = t(x)",
        "multiply_in_place = multiply_in_place(None, t, y, False, open_buckets, A, 1, 0)",
    ]
    x, y, plus = made()
    z = torch.randn(3)
    assert_same(run(graph, x, y, plus, z), [z.sin(), x.t() @ y])


def test_a_scattered_row_that_a_product_is_added_to_is_every_rows() -> None:
    owner = HandOwner("A", bucket(slot(0, ROWS, COLS)))
    draft, given = drafted()
    rows, values = draft.given("rows", 2, dtype=torch.int64), draft.given("values", 2, COLS)
    zeros = draft.call(aten.full.default, [1, COLS], 0, dtype=torch.float32)
    row = put(draft, zeros, rows, values)
    node = draft.call(aten.addmm.default, row, draft.call(aten.t.default, given["x"]), given["y"])
    graph = draft.give(draft.mark(owner, 0, node))
    run_passes(graph)
    x, y, plus = (tensor.round() for tensor in made())
    each = torch.randint(-8, 8, (2, COLS)).float()
    assert_same(run(graph, x, y, plus, torch.zeros(2).long(), each), [each.sum(0) + x.t() @ y])


TURNS: list[tuple[tuple[Any, ...], ...]] = [
    ((aten.t.default,), (aten.t.default,)),
    ((aten.permute.default, [1, 0]),),
    ((aten.permute.default, [-1, 0]), (aten.transpose.int, 0, -1)),
    ((aten.permute.default, [0, 1]),),
    ((aten.transpose.int, 1, 1), (aten.transpose.int, -2, 1)),
]


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("is_strided", [False, True])
def test_gradients_that_are_turned(turns: tuple[tuple[Any, ...], ...], is_strided: bool) -> None:
    draft, given = drafted()
    node = product(draft, given)
    for target, *rest in turns:
        node = draft.call(target, node, *rest)
    rows, cols = node.meta["val"].shape
    owner = HandOwner("A", bucket(slot(0, rows, cols, strides=(1, rows) if is_strided else None)))
    graph = draft.give(draft.mark(owner, 0, node))
    x, y, plus = made()
    run_passes(graph)
    assert len(calls(graph, MULTIPLY)) == 1
    wanted = x.t() @ y
    (got,) = run(graph, x, y, plus)
    assert torch.equal(got, wanted if (rows, cols) == (ROWS, COLS) else wanted.t())


def masked(draft: Draft, zeros: fx.Node, rows: fx.Node, values: fx.Node) -> fx.Node:
    mask = draft.call(aten.unsqueeze.default, draft.call(aten.lt.Scalar, rows, ROWS), -1)
    return draft.call(aten._unsafe_masked_index_put_accumulate.default, zeros, mask, [rows], values)


def put(draft: Draft, zeros: fx.Node, rows: fx.Node, values: fx.Node) -> fx.Node:
    return draft.call(aten.index_put.default, zeros, [rows], values, True)


def put_unsafely(draft: Draft, zeros: fx.Node, rows: fx.Node, values: fx.Node) -> fx.Node:
    return draft.call(aten._unsafe_index_put.default, zeros, [rows], values, True)


@pytest.mark.parametrize("scatter", [masked, put, put_unsafely], ids=lambda scatter: scatter.__name__)
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding(scatter: Any, is_tied: bool) -> None:
    """Its gradient alone, and summed with that of a last layer which has the same weight."""
    owner = HandOwner("A", bucket(slot(0, ROWS, COLS)))
    draft, given = drafted()
    rows, values = draft.given("rows", 2, 5, dtype=torch.int64), draft.given("values", 2, 5, COLS)
    zeros = draft.call(aten.full.default, [ROWS, COLS], 0, dtype=torch.float32)
    node = scatter(draft, zeros, rows, values)
    if is_tied:
        node = draft.call(aten.addmm.default, node, draft.call(aten.t.default, given["x"]), given["y"])
    graph = draft.give(draft.mark(owner, 0, node))
    run_passes(graph)
    wanted = ["open [0]", *["place 0 of 0"] * (1 + is_tied), "send 0", "receive"]
    x, y, plus = made()
    chosen = torch.tensor([[3, 7, 3, 0, -1], [129, 1, -130, 3, 8]])
    given_values = torch.randint(-8, 8, (2, 5, COLS)).float()  # whose sums are exact in any order
    expected = torch.zeros(ROWS, COLS).index_put_((chosen,), given_values, accumulate=True)
    if is_tied:
        x, y = x.round(), y.round()
        expected = expected + x.t() @ y
    assert_same(run(graph, x, y, plus, chosen, given_values), [expected])
    assert owner.heard == wanted
    left = [line.split(" = ")[0] for line in written(graph)]
    assert not {"full", "index_put", "_unsafe_index_put", "addmm"} & set(left)


def test_rows_that_are_masked_and_rows_that_are_not_there() -> None:
    out, rows, values = torch.zeros(4, 3), torch.tensor([0, 9, -9, 3]), torch.ones(4, 3)
    mask = torch.tensor([True, False, False, True]).unsqueeze(-1)
    add_rows_into(out, rows, values, mask, 0.5)
    assert torch.equal(out, torch.tensor([0.5, 0, 0, 0.5]).unsqueeze(-1).expand(4, 3))
    for wrong in (4, -5):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            add_rows_into(out, torch.tensor([wrong]), values[:1], None, 1.0)


def small(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    x, y = draft.given("narrow", 4, 100), draft.given("other", 100, 100)
    return draft.call(aten.mm.default, x, y), (4, 100)


def read_again(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    node = product(draft, given)
    draft.graph.call_function(aten.sin.default, (node,))
    return node, (ROWS, COLS)


def scaled(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    left = draft.call(aten.t.default, given["x"])
    return draft.call(aten.addmm.default, given["plus"], left, given["y"], beta=2), (ROWS, COLS)


def replaced(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    zeros = draft.call(aten.full.default, [ROWS, COLS], 0, dtype=torch.float32)
    rows = draft.given("rows", 8, dtype=torch.int64)
    return draft.call(aten.index_put.default, zeros, [rows], given["y"], False), (ROWS, COLS)


def added_to_ones(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    ones = draft.call(aten.full.default, [ROWS, COLS], 1, dtype=torch.float32)
    rows = draft.given("rows", 8, dtype=torch.int64)
    return draft.call(aten.index_put.default, ones, [rows], given["y"], True), (ROWS, COLS)


def by_column(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    zeros = draft.call(aten.full.default, [ROWS, COLS], 0, dtype=torch.float32)
    cols = draft.given("cols", ROWS, 2, dtype=torch.int64)
    column = draft.given("column", ROWS, 1, dtype=torch.int64)
    values = draft.given("values", ROWS, 2)
    return draft.call(aten.index_put.default, zeros, [column, cols], values, True), (ROWS, COLS)


def no_product(draft: Draft, given: dict[str, fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    return draft.call(aten.sin.default, given["plus"]), (ROWS, COLS)


NO_PLACES = [small, read_again, scaled, replaced, added_to_ones, by_column, no_product]


@pytest.mark.parametrize("make", NO_PLACES, ids=lambda make: make.__name__)
def test_what_stays_a_copy(make: Any) -> None:
    draft, given = drafted()
    node, shape = make(draft, given)
    owner = HandOwner("A", bucket(slot(0, *shape)))
    graph = draft.give(draft.mark(owner, 0, node))
    run_passes(graph)
    assert not calls(graph, OPEN, MULTIPLY, ADD_ROWS)
    assert calls(graph, SEND)[0].args[1] is None
    assert (small is make) == (shape[0] * shape[1] < LARGE_NUMEL)


def test_products_that_inductor_tunes_are_its_own() -> None:
    from torch._inductor import config

    draft, given = drafted()
    owner = HandOwner("A", bucket(slot(0, ROWS, COLS)))
    graph = draft.give(draft.mark(owner, 0, product(draft, given)))
    with config.patch(max_autotune_gemm=True):
        run_passes(graph)
    assert not calls(graph, OPEN, MULTIPLY, ADD_ROWS)


def test_one_that_is_not_sent_from_its_place_is_noticed() -> None:
    owner = HandOwner("A", bucket(slot(1, ROWS, COLS), slot(0, ROWS, COLS)))
    draft, given = drafted()
    marks = [draft.mark(owner, index, product(draft, given)) for index in (0, 1)]
    graph = draft.give(*marks)
    found = run_passes(graph).found
    (sent,) = calls(graph, SEND)
    inside = list(sent.args[0])  # type: ignore[arg-type]
    sent.update_arg(0, inside[::-1])
    with pytest.raises(InternalError, match="is not sent from there"):
        verify(graph, found)
    sent.update_arg(0, inside)
    verify(graph, found)
    sent.update_arg(1, None)
    with pytest.raises(InternalError, match="not sent behind it"):
        verify(graph, found)


@pytest.mark.parametrize("is_tied", [False, True])
def test_one_that_begins_twice_or_never_is_noticed(is_tied: bool) -> None:
    """Rows that are first would wipe a product out; those that are not would be added to the last step's."""
    owner = HandOwner("A", bucket(slot(0, ROWS, COLS)))
    draft, given = drafted()
    zeros = draft.call(aten.full.default, [ROWS, COLS], 0, dtype=torch.float32)
    node = put(draft, zeros, draft.given("rows", 8, dtype=torch.int64), given["y"])
    if is_tied:
        node = draft.call(aten.addmm.default, node, draft.call(aten.t.default, given["x"]), given["y"])
    graph = draft.give(draft.mark(owner, 0, node))
    found = run_passes(graph).found
    (added,) = calls(graph, ADD_ROWS)
    assert added.args[3] is not is_tied
    added.update_arg(3, is_tied)
    with pytest.raises(InternalError, match="or begins it again"):
        verify(graph, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.25, 1 / 3, 1 / 7])
@pytest.mark.parametrize("has_plus", [False, True])
def test_a_product_is_scaled_as_in_a_step_of_its_own(
    dtype: torch.dtype, scale: float, has_plus: bool
) -> None:
    x, y, more = (tensor.to(dtype) for tensor in made())
    plus = more if has_plus else None
    wanted = (torch.addmm(plus, x.t(), y) if plus is not None else x.t() @ y) * scale
    for out in (torch.full((ROWS, COLS), torch.nan), torch.full((COLS, ROWS), torch.nan).t()):
        out = out.to(dtype)
        multiply_into(out, plus, x.t(), y, scale)
        assert torch.equal(out, wanted)
