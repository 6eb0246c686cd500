"""What weft asks of autograd's engine. These are private names of torch: a test says when one has moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from weft.autograd import (
    accumulation_node,
    current_backward,
    current_node,
    is_reachable,
    on_backward_end,
    unseen_by_autograd,
    will_run,
)
from weft.data_parallel.arrivals import hooks_of


def at_backward(tensor: torch.Tensor, call: Callable[[], Any]) -> list[Any]:
    """What the call returns when the backward is at this tensor."""
    found: list[Any] = []
    tensor.register_hook(lambda _: found.append(call()))
    return found


def test_a_backward_has_a_number_while_it_runs() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = weight * 2
    numbers = at_backward(loss, current_backward)
    assert current_backward() is None
    loss.backward(retain_graph=True)
    loss.backward()
    assert current_backward() is None
    assert None not in numbers
    assert len(set(numbers)) == 2


def test_a_backward_within_a_backward_has_another_number() -> None:
    weight = torch.ones(1, requires_grad=True)
    inner: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        if y.requires_grad:  # not when it runs for the first time
            inner.append(at_backward(y, current_backward))
        return y

    out = checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=True)
    outer = at_backward(out, current_backward)
    out.backward()
    assert inner[-1] not in ([None], outer)


def test_the_end_is_told_after_all_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    seen: list[Any] = []
    at_backward(loss, lambda: on_backward_end(lambda: seen.append(weight.grad is not None)))
    loss.backward()
    assert seen == [True]


def test_an_error_at_the_end_comes_out_of_backward() -> None:
    loss = torch.ones(1, requires_grad=True) * 2

    def fail() -> None:
        raise OSError("told you so")

    at_backward(loss, lambda: on_backward_end(fail))
    with pytest.raises(OSError, match="told you so"):
        loss.backward()


def test_only_the_backward_holds_what_is_called_at_its_end() -> None:
    class BackwardError(Exception):
        pass

    weight = torch.ones(1, requires_grad=True)
    middle = weight * 2
    loss = middle * 2
    ends: list[weakref.ref[Any]] = []

    def begin() -> None:
        def end() -> None:
            raise AssertionError("the backward failed: its end is not told")

        ends.append(weakref.ref(end))
        on_backward_end(end)

    def fail() -> None:
        assert ends[0]() is not None
        raise BackwardError

    at_backward(loss, begin)
    at_backward(middle, fail)
    with pytest.raises(BackwardError):
        loss.backward()
    assert ends[0]() is None


def test_a_parameter_in_the_graph_will_get_a_gradient() -> None:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    nodes = [accumulation_node(used), accumulation_node(unused)]
    loss = used * 2
    found = at_backward(loss, lambda: [will_run(node) for node in nodes])
    loss.backward()
    assert found == [[True, False]]


def test_asking_for_other_gradients_gives_parameters_none() -> None:
    weight, x = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    node = accumulation_node(weight)
    out = weight * x
    found = at_backward(out, lambda: will_run(node))
    torch.autograd.grad(out, x, retain_graph=True)
    torch.autograd.grad(out, weight)
    assert found == [False, False]


def test_the_graph_below_a_node_can_be_searched() -> None:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss = (used * 2).exp()
    roots = at_backward(loss, current_node)
    loss.backward(retain_graph=True)
    assert is_reachable(roots, [accumulation_node(used)])
    assert not is_reachable(roots, [accumulation_node(unused)])
    assert not is_reachable([None], [accumulation_node(used)])


def test_a_write_that_autograd_does_not_see() -> None:
    weight, kept = torch.ones(1, requires_grad=True), torch.ones(1)
    loss = weight * kept
    with unseen_by_autograd([kept]):
        kept.fill_(3)
    loss.backward()  # it would refuse a tensor of another version


def test_the_hooks_of_a_parameter_are_in_a_dictionary() -> None:
    weight = torch.ones(1, requires_grad=True)
    assert hooks_of(weight) == {}
    handle = weight.register_post_accumulate_grad_hook(print)
    assert list(hooks_of(weight).values()) == [print]
    handle.remove()
    assert hooks_of(weight) == {}
