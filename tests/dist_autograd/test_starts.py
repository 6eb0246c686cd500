"""Where the engine starts in one worker's part of a backward: what has arrived, what is late, what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from weft.autograd import accumulation_node, has_hooks, run_engine
from weft.dist_autograd.cuts import cut_sent
from weft.dist_autograd.graph import Reached
from weft.dist_autograd.starts import Start, Starts, are_leaves, are_unwatched, starts_of

Register = Callable[[Tensor], Any]

GRADS = (torch.ones(3),)  # what arrived is not looked at, only under which number


def leaf(value: float = 1.0) -> Tensor:
    return torch.full((3,), value, requires_grad=True)


_tokens: list[Tensor] = []  # without its token a node is not to be used


@pytest.fixture(autouse=True)
def hold_tokens() -> Iterator[None]:
    yield
    _tokens.clear()


def node_of(*tensors: Tensor) -> Any:
    """The node behind which the graph of tensors that were sent lies."""
    _tokens.append(cut_sent(0, tensors))
    return _tokens[-1].grad_fn


def starts_with(sent: Mapping[int, tuple[Tensor, ...]], *arrived: int) -> Starts:
    tokens = {number: cut_sent(number, tensors) for number, tensors in sent.items()}
    return Starts(tokens, dict.fromkeys(arrived, GRADS))


def places(starts: Starts) -> tuple[list[int], list[int], list[int]]:
    return list(starts.arrived), list(starts.late), list(starts.waiting)


def reached_from(*tensors: Tensor) -> Reached:
    reached = Reached()
    reached.add([tensor.grad_fn for tensor in tensors])
    return reached


# Which start is where


def test_leaves_are_late_and_others_wait_until_their_gradients_are_there() -> None:
    a, b = leaf(), leaf()
    sent = {1: (a,), 2: (a * 2,), 3: (b,), 4: (b * 2,), 5: (a, b * 2), 6: (a, b)}
    assert places(starts_with(sent)) == ([], [1, 3, 6], [2, 4, 5])
    assert places(starts_with(sent, 3, 4)) == ([3, 4], [1, 6], [2, 5])
    assert places(starts_with(sent, *sent)) == ([*sent], [], [])


def test_gradients_of_what_does_not_take_part_are_not_a_start() -> None:
    assert places(starts_with({2: (leaf(),)}, 1)) == ([], [2], [])


def test_the_first_run_goes_from_what_has_arrived_and_from_what_waits() -> None:
    a = leaf()
    starts = starts_with({1: (a * 2,), 2: (a,), 3: (a * 3,), 4: (leaf(),)}, 3, 2)
    assert starts.first == [starts.arrived[2], starts.arrived[3], starts.waiting[1]]


def test_are_leaves_is_for_leaves_that_need_gradients() -> None:
    a, b = leaf(), leaf()
    assert are_leaves(node_of(a))
    assert are_leaves(node_of(a, b, a))
    assert not are_leaves(node_of(a * 2))
    assert not are_leaves(node_of(a, b * 2))
    assert not are_leaves(node_of(a, torch.ones(3)))
    assert not are_leaves(node_of(a.view_as(a)))


def test_late_leaves_are_the_nodes_that_add_to_their_gradients() -> None:
    a, b, c = leaf(), leaf(), leaf()
    starts = starts_with({1: (a, b), 2: (c * 2,), 3: (c,), 4: (b,)}, 3)
    nodes = [accumulation_node(tensor) for tensor in (a, b)]
    assert starts.late_leaves() == {1: nodes, 4: nodes[1:]}


# Which late leaves wait after all


def test_late_leaves_stay_late_where_nothing_else_comes_to_them() -> None:
    starts = starts_with({1: (leaf(),), 2: (leaf(), leaf()), 3: (leaf() * 2,)})
    starts.settle(reached_from(leaf() * 2))
    assert places(starts) == ([], [1, 2], [3])


def test_a_late_leaf_that_the_run_comes_to_waits() -> None:
    a, b = leaf(), leaf()
    starts = starts_with({1: (a,), 2: (b,)})
    starts.settle(reached_from((b * 2).sum()))
    assert places(starts) == ([], [1], [2])


def test_a_late_leaf_that_also_arrived_under_another_number_waits() -> None:
    a, b = leaf(), leaf()
    starts = starts_with({1: (a,), 2: (a,), 3: (b,)}, 2)
    reached = Reached()
    reached.add(starts.first)
    starts.settle(reached)
    assert places(starts) == ([2], [3], [1])


def test_a_late_leaf_below_something_that_waits_waits_too() -> None:
    a = leaf()
    starts = starts_with({1: (a,), 2: (a * 2,)})
    reached = Reached()
    reached.add(starts.first)
    starts.settle(reached)
    assert places(starts) == ([], [], [1, 2])


@pytest.mark.parametrize("first", ["a", "d"])
def test_those_that_share_a_leaf_with_a_moved_one_move_too(first: str) -> None:
    leaves = {name: leaf() for name in "abcde"}
    pairs = {1: "ab", 2: "bc", 3: "cd", 4: "e"}
    starts = starts_with({number: tuple(leaves[name] for name in pair) for number, pair in pairs.items()})
    starts.settle(reached_from(leaves[first] * 2))  # in the order of the numbers, and against it
    assert places(starts) == ([], [4], [1, 2, 3])


def test_what_moved_counts_as_reached() -> None:
    a, b = leaf(), leaf()
    starts = starts_with({1: (a, b)})
    reached = reached_from(a * 2)
    assert not reached.has(accumulation_node(b))
    starts.settle(reached)
    assert set(reached.leaves) == {accumulation_node(a), accumulation_node(b)}
    assert len(reached.leaves) == 2


def test_what_waits_stays_in_the_order_in_which_it_was_sent() -> None:
    a, b = leaf(), leaf()
    starts = starts_with({1: (a,), 2: (b * 2,), 3: (a,), 4: (leaf(),), 5: (b * 3,), 7: (a,), 9: (b * 4,)})
    assert list(starts.waiting) == [2, 5, 9]
    starts.settle(reached_from(a * 2))
    assert list(starts.waiting) == [1, 2, 3, 5, 7, 9]
    assert [node.number for node in starts.waiting.values()] == [1, 2, 3, 5, 7, 9]


@pytest.mark.parametrize("register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_a_leaf_with_a_hook_waits(register: Callable[..., Any]) -> None:
    watched, shared, other = leaf(), leaf(), leaf()
    register(watched, lambda _: None)
    starts = starts_with({1: (shared,), 2: (watched, shared), 3: (other,)})
    assert list(starts.late) == [1, 2, 3]
    starts.settle(Reached())
    assert places(starts) == ([], [3], [1, 2])


@pytest.mark.parametrize("register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_a_hook_that_is_gone_does_not_count(register: Callable[..., Any]) -> None:
    once_watched = leaf()
    register(once_watched, lambda _: None).remove()
    starts = starts_with({1: (once_watched,)})
    starts.settle(Reached())
    assert places(starts) == ([], [1], [])


def test_what_stands_for_a_sharded_parameter_waits() -> None:
    whole = leaf()
    whole._weft_is_unsharded = True  # type: ignore[attr-defined]
    starts = starts_with({1: (whole,), 2: (leaf(),)})
    starts.settle(Reached())
    assert places(starts) == ([], [2], [1])


def test_what_has_arrived_for_some_tensors_only_goes_through_send() -> None:
    a, b = leaf(), leaf()
    tokens = {number: cut_sent(number, tensors) for number, tensors in {1: (a, b), 2: (a * 2, b)}.items()}
    starts = Starts(tokens, {1: (torch.ones(3), None), 2: (None, None)})
    assert places(starts) == ([], [], [1, 2])


def test_in_a_profile_everything_goes_through_send() -> None:
    tokens = {number: cut_sent(number, [tensor]) for number, tensor in {1: leaf(), 2: leaf() * 2}.items()}
    assert places(Starts(tokens, {2: GRADS}, is_profiled=True)) == ([], [], [1, 2])


def test_leaves_that_need_no_gradient_any_more_are_no_start() -> None:
    frozen = leaf().requires_grad_(False)
    assert places(Starts({1: cut_sent(1, [frozen])}, {1: GRADS})) == ([], [], [])


def test_what_has_arrived_is_not_moved() -> None:
    a, watched = leaf(), leaf()
    watched.register_post_accumulate_grad_hook(lambda _: None)
    starts = starts_with({1: (a,), 2: (watched,)}, 1, 2)
    starts.settle(reached_from(a * 2))
    assert places(starts) == ([1, 2], [], [])


# Who watches


def test_different_leaves_without_hooks_are_unwatched() -> None:
    assert are_unwatched([accumulation_node(leaf()), accumulation_node(leaf())])
    assert are_unwatched([])


def test_a_leaf_that_is_there_twice_is_watched() -> None:
    a, b = leaf(), leaf()
    starts = starts_with({1: (a, b), 2: (a,)})
    first, second = starts.late_leaves().values()
    assert not are_unwatched(first + second)
    assert are_unwatched(first)


WATCHERS: list[Register] = [
    lambda tensor: accumulation_node(tensor).register_prehook(lambda _: None),
    lambda tensor: accumulation_node(tensor).register_hook(lambda *_: None),
]


@pytest.mark.parametrize("register", WATCHERS, ids=["prehook", "posthook"])
def test_leaves_are_watched_while_one_has_a_hook(register: Register) -> None:
    a, b = leaf(), leaf()
    nodes = [accumulation_node(a), accumulation_node(b)]
    handle = register(b)
    assert not are_unwatched(nodes)
    assert are_unwatched(nodes[:1])
    handle.remove()
    assert are_unwatched(nodes)


def test_a_leaf_is_watched_until_its_last_hook_is_gone() -> None:
    a = leaf()
    node = accumulation_node(a)
    handles = [register(a) for register in (*WATCHERS, *WATCHERS)]
    for handle in handles:
        assert not are_unwatched([node])
        handle.remove()
    assert are_unwatched([node])


NODES: list[Callable[[], Any]] = [
    lambda: accumulation_node(leaf()),
    lambda: leaf().exp().grad_fn,  # torch's
    lambda: node_of(leaf()),  # a Function's
]
every_kind = pytest.mark.parametrize("make_node", NODES, ids=["leaf", "operation", "function"])


@every_kind
@pytest.mark.parametrize("name", ["register_prehook", "register_hook"])
def test_has_hooks_tells_of_hooks_while_they_are_there(make_node: Callable[[], Any], name: str) -> None:
    node = make_node()
    assert not has_hooks(node)
    first, second = (getattr(node, name)(lambda *_: None) for _ in range(2))
    assert has_hooks(node)
    first.remove()
    assert has_hooks(node)
    second.remove()
    assert not has_hooks(node)


@every_kind
@pytest.mark.parametrize("name", ["register_prehook", "register_hook"])
def test_has_hooks_leaves_no_hook_behind(make_node: Callable[[], Any], name: str) -> None:
    node = make_node()
    for _ in range(3):
        assert not has_hooks(node)
    handle = getattr(node, name)(lambda *_: None)
    for _ in range(3):
        assert has_hooks(node)
    assert list(handle.hooks_dict_ref()) == [handle.id]


def test_hooks_run_as_before_when_somebody_has_asked_for_them() -> None:
    a = leaf()
    node, seen = accumulation_node(a), list[str]()
    node.register_prehook(lambda _: seen.append("before"))
    node.register_hook(lambda *_: seen.append("after"))
    assert has_hooks(node)
    (a * 2).sum().backward()
    assert seen == ["before", "after"]
    assert torch.equal(a.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


# Where gradients go in


def run_from(starts: list[Start], *roots: Tensor, retain_graph: bool = False) -> None:
    edges, grads = [edge for edge, _ in starts], [grad for _, grad in starts]
    run_engine(roots, [None] * len(roots), edges, grads, retain_graph=retain_graph)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def test_edges_are_paired_with_their_gradients() -> None:
    a = leaf()
    doubled, (first, _, third) = a * 2, (a * 3).unbind()
    grads = [torch.full((), 1.0), torch.full((3,), 2.0), torch.full((3,), 3.0), torch.full((), 4.0)]
    found = starts_of(node_of(third, a, doubled, first), grads)
    assert [grad for _, grad in found] == grads
    assert third.grad_fn is not None
    wanted = [(third.grad_fn, 2), (accumulation_node(a), 0), (doubled.grad_fn, 0), (third.grad_fn, 0)]
    assert [(edge.node, edge.output_nr) for edge, _ in found] == wanted
    assert all(type(edge) is GradientEdge for edge, _ in found)


def test_what_got_no_gradient_is_no_start() -> None:
    a, b = leaf(), leaf()
    grad = torch.ones(3)
    ((edge, found),) = starts_of(node_of(a, b, a * 2), [None, grad, None])
    assert edge.node is accumulation_node(b)
    assert found is grad
    assert starts_of(node_of(a, b), [None, None]) == []


@pytest.mark.parametrize("num_grads", [1, 3])
def test_there_is_a_gradient_or_none_for_each_of_what_was_sent(num_grads: int) -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        starts_of(node_of(leaf(), leaf()), [torch.ones(3)] * num_grads)


def compute(a: Tensor, b: Tensor) -> list[Tensor]:
    """Things that may be sent, with a graph that they share."""
    product = a.exp() * b
    first, _, third = (product + a).unbind()
    return [product, third, b, first, product.sin()]


def test_the_engine_starts_at_edges_as_it_does_at_the_tensors() -> None:
    (a, b), (wanted_a, wanted_b) = (leaf(0.5), leaf(2.0)), (leaf(0.5), leaf(2.0))
    sent, wanted = compute(a, b), compute(wanted_a, wanted_b)
    grads = [torch.full_like(tensor, place + 1.0) for place, tensor in enumerate(sent)]
    run_from(starts_of(node_of(*sent), grads))
    torch.autograd.backward(wanted, grads)
    assert torch.equal(grad_of(a), grad_of(wanted_a))
    assert torch.equal(grad_of(b), grad_of(wanted_b))


@pytest.mark.parametrize("make_root", [Tensor.sum, lambda tensor: tensor[:1]], ids=["scalar", "not a scalar"])
def test_the_engine_adds_up_what_comes_from_roots_and_from_edges(
    make_root: Callable[[Tensor], Tensor],
) -> None:
    (a, b), (wanted_a, wanted_b) = (leaf(0.5), leaf(2.0)), (leaf(0.5), leaf(2.0))
    sent, wanted = compute(a, b), compute(wanted_a, wanted_b)
    grads = [torch.full_like(tensor, place + 1.0) for place, tensor in enumerate(sent)]
    starts = starts_of(node_of(*sent), grads)
    run_from(starts, make_root(sent[0]))
    torch.autograd.backward([make_root(wanted[0]), *wanted], [None, *grads])
    assert torch.equal(grad_of(a), grad_of(wanted_a))
    assert torch.equal(grad_of(b), grad_of(wanted_b))


def test_the_graph_is_kept_where_that_is_asked_for() -> None:
    a = leaf(0.5)
    starts = starts_of(node_of(a.exp()), [torch.ones(3)])
    run_from(starts, retain_graph=True)
    once = grad_of(a).clone()
    run_from(starts)
    assert torch.equal(grad_of(a), once * 2)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_from(starts)


def test_the_graph_is_that_of_the_tensor_as_it_was_sent() -> None:
    a, b = leaf(), leaf()
    sent = a * 3
    node = node_of(sent)
    sent.mul_(5)
    sent.add_(b)
    run_from(starts_of(node, [torch.ones(3)]))
    assert torch.equal(grad_of(a), torch.full((3,), 3.0))
    assert b.grad is None


def test_a_leaf_that_was_written_to_after_it_was_sent_gets_its_gradient() -> None:
    a = leaf()
    node = node_of(a)
    with torch.no_grad():
        a.mul_(5)
    run_from(starts_of(node, [torch.full((3,), 7.0)]))
    assert torch.equal(grad_of(a), torch.full((3,), 7.0))


def test_a_sent_tensor_that_the_graph_needs_must_not_be_changed() -> None:
    sent = leaf().exp()  # whose gradient is computed from the result
    node = node_of(sent)
    sent.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_from(starts_of(node, [torch.ones(3)]))


@pytest.mark.parametrize("make", [lambda a: a, lambda a: a * 2], ids=["leaf", "computed"])
@pytest.mark.parametrize("root_shape", [(), (2,)], ids=["scalar", "not a scalar"])
def test_a_gradient_of_a_wrong_shape_is_refused(
    make: Callable[[Tensor], Tensor], root_shape: tuple[int, ...]
) -> None:
    a, b = leaf(), torch.ones(root_shape, requires_grad=True)
    ((edge, grad),) = starts_of(node_of(make(a)), [torch.ones(5)])
    with pytest.raises(
        RuntimeError, match=r"expected shape compatible with \[3\]|must match the size.*\(5\)"
    ):
        run_engine([b * 2], [torch.ones(root_shape)], [edge], [grad], retain_graph=False)
    assert a.grad is None
    assert b.grad is None
