"""Passes over the collectives of sharded parameters: a graph before, a graph after, and the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.compiler.graphs import WAIT, add_call
from weft.compiler.passes.bucket_gathers import bucket_gathers
from weft.compiler.passes.bucket_scatters import bucket_scatters
from weft.compiler.passes.find_shards import GATHER, SCATTER, find_gathers, find_scatters, moved_numels, runs
from weft.compiler.passes.pace_shards import pace_gathers, pace_scatters
from weft.compiler.passes.verify import verify, verify_shards
from weft.errors import InternalError

aten: Any = torch.ops.aten
NUM_RANKS = 2
NAMES = {
    GATHER: "gather",
    SCATTER: "scatter",
    WAIT: "wait",
    aten.mm.default: "layer",
    aten.cat.default: "cat",
}


class Draft:
    """A graph under way, with the tensors that go into it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.values: list[Tensor] = []

    def input(self, *shape: int) -> fx.Node:
        value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + len(self.values)
        node = self.graph.placeholder(f"input_{len(self.values)}")
        node.meta["val"] = self.mode.from_tensor(value)
        self.values.append(value)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        return add_call(self.graph, target, *args)

    def gather(self, shard: fx.Node, group: str = "0") -> fx.Node:
        return self.call(WAIT, self.call(GATHER, shard, NUM_RANKS, group))

    def scatter(self, table: fx.Node, group: str = "0") -> fx.Node:
        return self.call(WAIT, self.call(SCATTER, table, "sum", NUM_RANKS, group))

    def end(self, *results: fx.Node) -> fx.Graph:
        self.graph.output(results)
        return self.graph


class Pretended(fx.Interpreter):
    """Runs a graph as if another rank had each tensor and ten more."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is GATHER:
            return torch.cat([args[0], args[0] + 10])
        if target is SCATTER:
            return args[0].view(NUM_RANKS, -1)[0] * 2 + 10
        if target is WAIT:
            return args[0]
        return super().call_function(target, args, kwargs)


def run(draft: Draft) -> tuple[Tensor, ...]:
    return Pretended(fx.GraphModule(torch.nn.Module(), draft.graph)).run(*draft.values)


def story(graph: fx.Graph) -> list[str]:
    return [NAMES[node.target] for node in graph.nodes if node.target in NAMES]


def layers(num: int = 3, groups: str = "000") -> Draft:
    """A forward: each layer's weight is gathered right before it."""
    draft = Draft()
    shards = [draft.input(8) for _ in range(num)]
    x = draft.input(4, 4)
    for shard, group in zip(shards, groups, strict=True):
        weight = draft.call(aten.reshape.default, draft.gather(shard, group), [4, 4])
        x = draft.call(aten.mm.default, x, weight)
    draft.end(x)
    return draft


def backward(num: int = 3) -> Draft:
    """A backward: each layer's gradient is scattered as soon as it is there."""
    draft = Draft()
    weights = [draft.input(4, 4) for _ in range(num)]
    grad, results = draft.input(4, 4), []
    for weight in weights:
        table = draft.call(aten.reshape.default, grad, [16])
        results.append(draft.call(aten.div.Tensor, draft.scatter(table), 2.0))
        grad = draft.call(aten.mm.default, grad, weight)
    draft.end(*results, grad)
    return draft


def assert_same_numbers(draft: Draft, change: Callable[[fx.Graph], Any]) -> None:
    wanted = run(draft)
    moved = moved_numels([*find_gathers(draft.graph), *find_scatters(draft.graph)])
    change(draft.graph)
    verify(draft.graph, [])
    verify_shards(find_gathers(draft.graph), find_scatters(draft.graph), moved)
    for found, right in zip(run(draft), wanted, strict=True):
        assert torch.equal(found, right)


def test_gathers_become_one() -> None:
    draft = layers()
    assert story(draft.graph) == ["gather", "wait", "layer"] * 3
    assert_same_numbers(draft, lambda graph: bucket_gathers(graph, find_gathers(graph), 1e6))
    assert story(draft.graph) == ["cat", "gather", "wait", "layer", "layer", "layer"]


def test_gathers_up_to_the_cap_become_one() -> None:
    draft = layers()
    assert_same_numbers(draft, lambda graph: bucket_gathers(graph, find_gathers(graph), 2 * 16 * 4))
    assert story(draft.graph) == ["cat", "gather", "wait", "layer", "layer", "gather", "wait", "layer"]


def test_gathers_of_other_groups_stay_apart() -> None:
    draft = layers(groups="010")
    assert_same_numbers(draft, lambda graph: bucket_gathers(graph, find_gathers(graph), 1e6))
    assert story(draft.graph) == ["gather", "wait", "layer"] * 3


def test_gathers_of_activations_are_not_parameters() -> None:
    draft = Draft()
    x = draft.call(aten.mm.default, draft.input(4, 4), draft.input(4, 4))
    draft.end(draft.gather(x))
    assert find_gathers(draft.graph) == []


def test_scatters_become_one() -> None:
    draft = backward()
    assert story(draft.graph) == ["scatter", "wait", "layer"] * 3
    assert_same_numbers(draft, lambda graph: bucket_scatters(graph, find_scatters(graph), 1e6))
    assert story(draft.graph) == ["layer", "layer", "cat", "scatter", "wait", "layer"]


def test_scatters_that_others_need_are_not_gradients() -> None:
    draft = Draft()
    draft.end(draft.gather(draft.scatter(draft.input(16))))
    assert find_scatters(draft.graph) == []


def test_a_scatter_whose_result_waits_for_more_stays_alone() -> None:
    """Two scatterings, and a sum of the first with what is there only after the second."""
    draft = Draft()
    grad, weight = draft.input(4, 4), draft.input(4, 4)
    first = draft.scatter(draft.call(aten.reshape.default, grad, [16]))
    second = draft.scatter(draft.call(aten.reshape.default, grad, [16]))
    late = draft.call(aten.reshape.default, draft.call(aten.mm.default, grad, weight), [2, 8])
    draft.end(draft.call(aten.add.Tensor, first, draft.call(operator.getitem, late, 0)), second)
    assert_same_numbers(draft, lambda graph: bucket_scatters(graph, find_scatters(graph), 1e6))
    assert story(draft.graph) == ["scatter", "wait", "scatter", "wait", "layer"]


def test_gathers_are_one_ahead() -> None:
    draft = layers()
    assert_same_numbers(draft, lambda graph: pace_gathers(graph, find_gathers(graph)))
    assert story(draft.graph) == [
        *("gather", "gather", "wait", "layer"),
        *("gather", "wait", "layer"),
        *("wait", "layer"),
    ]


def test_scatters_are_one_behind() -> None:
    draft = backward()
    assert_same_numbers(draft, lambda graph: pace_scatters(graph, find_scatters(graph)))
    assert story(draft.graph) == [
        *("scatter", "layer"),
        *("wait", "scatter", "layer"),
        *("wait", "scatter", "wait", "layer"),
    ]


@pytest.mark.parametrize(("cap", "wanted"), [(0, [1, 1, 1]), (128, [2, 1]), (1e9, [3])])
def test_runs(cap: float, wanted: list[int]) -> None:
    assert [len(run) for run in runs(find_gathers(layers().graph), cap)] == wanted


def test_a_lost_gathering_is_noticed() -> None:
    draft = layers()
    gathers = find_gathers(draft.graph)
    with pytest.raises(InternalError, match="changed what sharded parameters send"):
        verify_shards(gathers[1:], [], moved_numels(gathers))
