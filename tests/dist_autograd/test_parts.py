"""One worker's part: when the graph is cut, the engine's order, gradients for leaves and on their way.

On a GPU the engine has threads of its own: a backward tells its number before anything in it can wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.autograd import accumulation_node, run_last
from weft.dist_autograd import running
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.cuts import RecvCut, tie_received
from weft.dist_autograd.landing import Landing
from weft.dist_autograd.messages import Batch, flatten_batch, read_batch
from weft.dist_autograd.run import Abandoned, Run

# When the graph behind what is sent is cut: before it goes, or when it is on its way


def computed() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


def is_cut(tensors: list[Tensor], *, are_given_up: bool) -> bool:
    """Whether it is before the message goes."""
    context = DistAutogradContext(1)
    number = context.add_sent(0, tensors, are_given_up=are_given_up)
    was_cut = context.sent[number].token is not None
    context.cut(number)
    assert context.sent[number].token is not None
    assert context.sent[number].tensors is None
    return was_cut


def test_what_was_given_up_is_cut_when_it_is_on_its_way() -> None:
    assert not is_cut([computed()], are_given_up=True)


def test_what_others_may_have_is_cut_before() -> None:
    assert is_cut([computed()], are_given_up=False)


@pytest.mark.parametrize(
    "hold", [lambda result: result[:1], lambda result: result.view_as(result), weakref.ref]
)
def test_what_can_be_come_by_is_cut_before(hold: Callable[[Tensor], Any]) -> None:
    result = computed()
    held = hold(result)
    assert is_cut([result], are_given_up=True)
    del held


def test_a_view_is_cut_before() -> None:
    assert is_cut([computed()[:2]], are_given_up=True)


def test_leaves_are_cut_when_they_are_on_their_way() -> None:
    assert not is_cut([torch.ones(3, requires_grad=True)], are_given_up=False)


def test_one_that_can_be_changed_is_enough() -> None:
    assert is_cut([torch.ones(3, requires_grad=True), computed()], are_given_up=False)


@pytest.mark.parametrize("is_later", [False, True])
def test_the_graph_is_the_one_of_what_was_sent(is_later: bool) -> None:
    leaf = torch.ones(3, requires_grad=True)
    context = DistAutogradContext(1)
    number = context.add_sent(0, [leaf * 2], are_given_up=is_later)
    node: Any = context.tokens()[number].grad_fn
    ((behind, _),) = node.next_functions
    assert behind.name() == "MulBackward0"


# In which order the engine comes to nodes of several workers


def test_a_backward_tells_its_number_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seen: list[tuple[int, int]] = []

    def make_ready() -> None:
        # A new thread numbers its nodes from 0 on, as sends that wait are numbered.
        token = torch.zeros((), requires_grad=True).exp()
        run_last([token.grad_fn], [])
        run: Any = object()
        with running.at_work(run) as roots:
            (root,) = roots
            assert root.grad_fn is not None
            seen.append((root.grad_fn._sequence_nr(), token.grad_fn._sequence_nr()))  # type: ignore[union-attr]

    thread = threading.Thread(target=make_ready)
    thread.start()
    thread.join()
    ((first, waiting),) = seen
    assert first > waiting
    assert first > 2**60  # more than any thread has numbered


class Watched:
    """A part of a backward that notes what is given away."""

    class context:
        id = 1

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def give_away(self, *_: Any) -> None:
        self._seen.append("given away")


def test_what_another_worker_waits_for_is_given_away_before_others_are_computed() -> None:
    seen: list[str] = []
    route: Any = SimpleNamespace(peer_name="other")
    (x,), _ = tie_received(RecvCut(1, 1, route), [torch.ones(2, 3)])
    weight = torch.ones(4, 3, requires_grad=True)
    turned = weight.t()  # made after x: the engine would come to it first
    weight.register_hook(lambda _: seen.append("the weight has its gradient"))
    run: Any = Watched(seen)
    with running.at_work(run) as more:
        torch.autograd.backward([(x @ turned).sum(), *more])
    assert seen.index("given away") < seen.index("the weight has its gradient")


def test_of_several_the_latest_is_given_away_first() -> None:
    route: Any = SimpleNamespace(peer_name="other")
    received = [tie_received(RecvCut(1, number, route), [torch.ones(2)]) for number in range(3)]
    numbers = [node._sequence_nr() for _, node in received]
    assert numbers == sorted(set(numbers))


def test_a_backward_tells_its_number_before_anything_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    route: Any = SimpleNamespace(peer_name="other")
    (received,), node = tie_received(RecvCut(1, 1, route), [torch.ones(2)])
    assert received.grad_fn is node
    run: Any = object()
    with running.at_work(run) as (root,):
        assert root.grad_fn._sequence_nr() > node._sequence_nr()  # type: ignore[union-attr]


# Gradients that came for leaves which nobody watches, and the end of a worker's part


def test_gradients_for_leaves_are_taken_as_they_are() -> None:
    context = DistAutogradContext(1)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    grads = [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    landing = Landing(context)
    assert landing.take([(accumulation_node(leaf), grad) for leaf, grad in zip(leaves, grads, strict=True)])
    landing.settle(has_failed=False)
    assert all(context.grads[leaf] is grad for leaf, grad in zip(leaves, grads, strict=True))
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize(
    "unfit", [torch.ones(3, dtype=torch.float64), torch.ones(1), torch.ones(3, device="meta")]
)
def test_none_is_taken_where_one_is_not_as_its_leaf(unfit: torch.Tensor) -> None:
    context = DistAutogradContext(1)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    landing = Landing(context)
    pairs = [(accumulation_node(leaves[0]), torch.ones(3)), (accumulation_node(leaves[1]), unfit)]
    assert not landing.take(pairs)
    landing.settle(has_failed=False)
    assert not context.grads


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_part_with_nothing_left_to_wait_for_ends_as_the_backward_does(has_failed: bool) -> None:
    agent: Any = SimpleNamespace(resolve_timeout=lambda _: 0)  # pyright: ignore[reportUnknownLambdaType]
    run = Run(agent, DistAutogradContext(1), 1, retain_graph=False, is_exact=False)
    if has_failed:
        assert run.fail(1, ("it", "broke", None))
        with pytest.raises(Abandoned):
            run.execute()
    else:
        assert run.execute() == []


# Gradients on their way: side by side, and by number again


def test_a_batch_is_the_same_on_the_other_side() -> None:
    grads = [torch.full((2,), float(number)) for number in range(3)]
    batch: Batch = [(7, (grads[0], None)), (3, ()), (9, (grads[1], grads[2]))]
    found = read_batch(flatten_batch(batch))
    assert [(number, [id(grad) for grad in tensors]) for number, tensors in found] == [
        (number, [id(grad) for grad in tensors]) for number, tensors in batch
    ]


def test_one_that_came_for_several_is_each_ones_own() -> None:
    grad, other = torch.ones(2), torch.zeros(2)
    found = dict(read_batch(flatten_batch([(1, (grad, grad)), (2, (None, grad, other, None))])))
    tensors = [tensor for grads in found.values() for tensor in grads if tensor is not None]
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    assert found[2][0] is None
    assert found[2][3] is None
    assert tensors[3] is other
