"""In which order the engine comes to nodes of several workers.

On a GPU it has threads of its own: a backward tells its number before anything in it can wait.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.autograd import run_last
from weft.dist_autograd import running
from weft.dist_autograd.cuts import RecvCut, tie_received


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
