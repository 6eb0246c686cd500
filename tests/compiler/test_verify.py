"""The last pass: good graphs pass, and each way to break one is an InternalError."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.compiler.hand_graphs import Draft, HandOwner, bucket, slot
from weft.compiler.graphs import WAIT, c10d, calls
from weft.compiler.ops import BEGIN, END, MARK, RECEIVE, REDUCE, SEND
from weft.compiler.passes.find_marks import Reducible, find_reducible
from weft.compiler.passes.launch_early import launch_early
from weft.compiler.passes.verify import verify
from weft.compiler.pipeline import FORMS
from weft.errors import InternalError

aten = torch.ops.aten
REDUCES = c10d.all_reduce.default, c10d.all_reduce_coalesced.default
owners: list[HandOwner] = []  # graphs hold owners by number only


def good(form: str, num_buckets: int = 3) -> tuple[fx.Graph, list[Reducible]]:
    owner = HandOwner("A", *(bucket(slot(index, 2)) for index in range(num_buckets)))
    owners.append(owner)
    draft = Draft()
    inputs = [draft.given(f"x{index}", 2) for index in range(num_buckets)]
    graph = draft.give(*(draft.mark(owner, index, node) for index, node in enumerate(inputs)))
    found = find_reducible(graph)
    for one in found:
        FORMS[form](graph, one)
    return graph, found


def output_of(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def copy_before_output(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(output_of(graph)):
        return graph.node_copy(node, lambda one: one)


@pytest.mark.parametrize("num_buckets", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_good_graph(form: str, num_buckets: int) -> None:
    verify(*good(form, num_buckets))


def test_a_graph_with_nothing_to_reduce() -> None:
    draft = Draft()
    verify(draft.give(draft.given("x", 2)), [])


# Sends


def send_left_out(graph: fx.Graph) -> None:
    """The second bucket's gradient is handed out as it is."""
    first, second, third = calls(graph, SEND)
    third.replace_input_with(second, first)
    (receive,) = calls(graph, RECEIVE)
    receive.args = ([first, third], receive.args[1])
    (piece,) = second.users
    piece.replace_all_uses_with(second.args[0][0])  # type: ignore[arg-type, index]
    graph.erase_node(piece)
    graph.erase_node(second)


def send_twice(graph: fx.Graph) -> None:
    last = calls(graph, SEND)[-1]
    with graph.inserting_after(last):
        again = graph.node_copy(last, lambda one: one)
    (receive,) = calls(graph, RECEIVE)
    receive.args = ([*receive.args[0], again], receive.args[1])  # type: ignore[misc]


def sends_out_of_order(graph: fx.Graph) -> None:
    first, second, _ = calls(graph, SEND)
    second.update_arg(1, None)
    first.update_arg(1, second)
    first.prepend(second)


def sends_that_change_numbers(graph: fx.Graph) -> None:
    first, second, _ = calls(graph, SEND)
    first.update_arg(3, 1)
    second.update_arg(3, 0)


def nothing_is_received(graph: fx.Graph) -> None:
    graph.erase_node(calls(graph, RECEIVE)[0])


def received_twice(graph: fx.Graph) -> None:
    copy_before_output(graph, calls(graph, RECEIVE)[0])


def one_is_not_received(graph: fx.Graph) -> None:
    (receive,) = calls(graph, RECEIVE)
    receive.args = (receive.args[0][1:], receive.args[1])  # type: ignore[index]


def used_before_it_is_received(graph: fx.Graph) -> None:
    (receive,) = calls(graph, RECEIVE)
    receive.prepend(calls(graph, aten.slice.Tensor)[0])


def received_after_its_use(graph: fx.Graph) -> None:
    output_of(graph).prepend(calls(graph, RECEIVE)[0])


def begun_though_in_buffers(graph: fx.Graph) -> None:
    first = calls(graph, SEND)[0]
    with graph.inserting_before(first):
        graph.call_function(BEGIN, (first.args[2], first.args[4]))


SEND_BREAKS = [
    send_left_out,
    send_twice,
    sends_out_of_order,
    sends_that_change_numbers,
    nothing_is_received,
    received_twice,
    one_is_not_received,
    used_before_it_is_received,
    received_after_its_use,
    begun_though_in_buffers,
]


@pytest.mark.parametrize("damage", SEND_BREAKS, ids=lambda damage: damage.__name__)
def test_a_broken_send(damage: Callable[[fx.Graph], None]) -> None:
    graph, found = good("buffers")
    damage(graph)
    with pytest.raises(InternalError):
        verify(graph, found)


# Collectives of the graph


def no_begin(graph: fx.Graph) -> None:
    (begin,) = calls(graph, BEGIN)
    for tail in list(begin.users):
        for reader in list(tail.users):
            (other, *_) = [node for node in reader.all_input_nodes if node is not tail]
            reader.replace_input_with(tail, other)
        graph.erase_node(tail)
    graph.erase_node(begin)


def no_end(graph: fx.Graph) -> None:
    graph.erase_node(calls(graph, END)[0])


def two_ends(graph: fx.Graph) -> None:
    copy_before_output(graph, calls(graph, END)[0])


def two_begins(graph: fx.Graph) -> None:
    copy_before_output(graph, calls(graph, BEGIN)[0])


def used_without_a_wait(graph: fx.Graph) -> None:
    wait = calls(graph, WAIT)[0]
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    graph.erase_node(wait)


def also_used_without_a_wait(graph: fx.Graph) -> None:
    wait = calls(graph, WAIT)[0]
    with graph.inserting_after(wait):
        graph.call_function(aten.sin.default, (wait.all_input_nodes[0],))


def a_wait_behind_its_use(graph: fx.Graph) -> None:
    output_of(graph).prepend(next(iter(calls(graph, END)[0].all_input_nodes)))


def launched_and_forgotten(graph: fx.Graph) -> None:
    copy_before_output(graph, calls(graph, *REDUCES)[0])


def a_launch_left_out(graph: fx.Graph) -> None:
    """What goes into the second launch is taken for what comes of it."""
    launch = calls(graph, *REDUCES)[1]
    sent = launch.args[0]
    given: list[Any] = sent if isinstance(sent, list) else [sent]  # type: ignore[assignment]
    readers = [node for node in launch.users if node.target is operator.getitem] or [launch]
    for node in readers:
        at = int(node.args[1]) if node is not launch else 0  # type: ignore[arg-type]
        (wait,) = node.users
        wait.replace_all_uses_with(given[at])
        graph.erase_node(wait)
    for node in [*(node for node in readers if node is not launch), launch]:
        graph.erase_node(node)


def launches_out_of_order(graph: fx.Graph) -> None:
    launch_early(graph, calls(graph, *REDUCES)[1:2])


LAUNCH_BREAKS = [
    no_begin,
    no_end,
    two_ends,
    two_begins,
    used_without_a_wait,
    also_used_without_a_wait,
    a_wait_behind_its_use,
    launched_and_forgotten,
    a_launch_left_out,
    launches_out_of_order,
]


@pytest.mark.parametrize("form", ["concat", "coalesced"])
@pytest.mark.parametrize("damage", LAUNCH_BREAKS, ids=lambda damage: damage.__name__)
def test_a_broken_collective(damage: Callable[[fx.Graph], None], form: str) -> None:
    graph, found = good(form)
    damage(graph)
    with pytest.raises(InternalError):
        verify(graph, found)


@pytest.mark.parametrize("form", FORMS)
def test_a_collective_of_the_users_may_read_a_mean(form: str) -> None:
    graph, found = good(form)
    output = output_of(graph)
    means: Any = output.args[0]
    with graph.inserting_before(output):
        launch = graph.call_function(c10d.all_reduce.default, (means[0], "sum", "group of A"))
        norm = graph.call_function(WAIT, (launch,))
    output.args = ((*means, norm),)
    verify(graph, found)


def test_items_of_a_list_that_nobody_waits_for() -> None:
    graph, found = good("coalesced")
    wait = calls(graph, WAIT)[0]
    item = wait.all_input_nodes[0]
    wait.replace_all_uses_with(calls(graph, c10d.all_reduce_coalesced.default)[0].all_input_nodes[0])
    graph.erase_node(wait)
    assert not item.users
    with pytest.raises(InternalError):
        verify(graph, found)


# Marks


@pytest.mark.parametrize("kind", [MARK, REDUCE], ids=["mark", "reduce"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mark_that_was_left(form: str, kind: Any) -> None:
    graph, found = good(form)
    source = next(iter(graph.nodes))
    with graph.inserting_before(output_of(graph)):
        graph.call_function(kind, (source, found[0].owner, 1, ""))
    with pytest.raises(InternalError, match=r"gradient 1 .* left out of its bucket"):
        verify(graph, found)


def test_nothing_was_done() -> None:
    owner = HandOwner("A", bucket(slot(0, 2)))
    draft = Draft()
    graph = draft.give(draft.mark(owner, 0, draft.given("x", 2)))
    found = find_reducible(graph)
    with pytest.raises(InternalError, match="left out of its bucket"):
        verify(graph, found)


def test_a_mark_of_one_who_has_nothing_to_reduce_here_may_stay() -> None:
    graph, found = good("buffers")
    other = HandOwner("B")
    with graph.inserting_before(output_of(graph)):
        graph.call_function(REDUCE, (next(iter(graph.nodes)), other.number, 0, ""))
    verify(graph, found)


def test_one_of_two_owners_is_broken() -> None:
    one, two = HandOwner("one", bucket(slot(0, 2))), HandOwner("two", bucket(slot(0, 2)))
    draft = Draft()
    x = draft.given("x", 2)
    graph = draft.give(draft.mark(one, 0, x), draft.mark(two, 0, x))
    found = find_reducible(graph)
    for reducible in found:
        FORMS["buffers"](graph, reducible)
    verify(graph, found)
    calls(graph, SEND)[1].update_arg(2, one.number)
    with pytest.raises(InternalError, match=r"sends \[0, 0\]"):
        verify(graph, found)
