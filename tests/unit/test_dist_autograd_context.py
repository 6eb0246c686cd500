"""When the graph behind what is sent is cut: before it goes, or when it is on its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.dist_autograd.context import DistAutogradContext


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
