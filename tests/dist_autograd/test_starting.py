"""Where a worker's part of a backward starts: with what has arrived, whatever becomes of the rest."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from tests.ranks import run_on
from tests.rpc.workers import from_worker0
from weft import dist_autograd, rpc
from weft.dist_autograd.tracker import GraphTracker

LIMITS: dict[str, Any] = {"timeout": 60, "collective_timeout": 60}

pytestmark = run_on(threads=2, **LIMITS)

_kept: dict[str, Tensor] = {}


def gradient(context_id: int, name: str) -> Tensor | None:
    return dist_autograd.get_gradients(context_id).get(_kept[name])


def make(name: str) -> Tensor:
    _kept[name] = torch.ones(3, requires_grad=True)
    return _kept[name]


def fetch_both(is_together: bool) -> tuple[Tensor, Tensor]:
    if is_together:
        first, second = rpc.rpc_sync("worker2", make_both)
    else:
        first, second = (rpc.rpc_sync("worker2", make, (name,)) for name in ("first", "second"))
    return first * 3, second * 3


def make_both() -> tuple[Tensor, Tensor]:
    return make("first") * 2, make("second") * 2


@run_on(threads=3, **LIMITS)
@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("exact", [True, False])
@from_worker0
def test_a_worker_hears_that_there_is_no_gradient(is_together: bool, exact: bool) -> None:
    """One of two results is used. Both lead on to a third worker."""
    with dist_autograd.context() as context_id:
        used, _ = rpc.rpc_sync("worker1", fetch_both, (is_together,))
        dist_autograd.backward(context_id, [used.sum()], exact=exact)
        first, second = (
            rpc.rpc_sync("worker2", gradient, (context_id, name)) for name in ("first", "second")
        )
    assert first is not None
    assert first.tolist() == [6.0 if is_together else 3.0] * 3
    assert second is None


def make_three(is_first: bool) -> Tensor | tuple[Tensor, Tensor]:
    return make("first") if is_first else (make("second"), make("third"))


def gradients(context_id: int) -> list[Tensor]:
    return [dist_autograd.get_gradients(context_id)[_kept[name]] for name in ("first", "second")]


@from_worker0
def test_leaves_that_get_one_gradient_have_their_own() -> None:
    """One came for two messages, one of which is used in part: it starts at a leaf, and goes through Send."""
    with dist_autograd.context() as context_id:
        first: Any = rpc.rpc_sync("worker1", make_three, (True,))
        second, _ = rpc.rpc_sync("worker1", make_three, (False,))
        loss = ((first + second) * torch.tensor([1.0, 2.0, 3.0])).sum()
        for retain_graph in (True, False):
            dist_autograd.backward(context_id, [loss], retain_graph=retain_graph)
        found = rpc.rpc_sync("worker1", gradients, (context_id,))
    assert [grad.tolist() for grad in found] == [[2.0, 4.0, 6.0]] * 2


def share(place: int) -> Tensor:
    return _shared[place]


_shared = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]


def sums(context_id: int) -> list[float]:
    found = dist_autograd.get_gradients(context_id)
    return [found[leaf].sum().item() for leaf in _shared]


@from_worker0
def test_passes_add_up_for_each_leaf() -> None:
    """Leaves that get one and the same gradient from another worker, each in a message of its own."""
    with dist_autograd.context() as context_id:
        both = rpc.rpc_sync("worker1", share, (0,)) + rpc.rpc_sync("worker1", share, (1,))
        loss = (both * torch.ones(2, 2)).sum()
        for retain_graph in (True, False):
            dist_autograd.backward(context_id, [loss], retain_graph=retain_graph)
        assert rpc.rpc_sync("worker1", sums, (context_id,)) == [8.0, 8.0]


@pytest.mark.parametrize("mode", ["all", "any"])
@from_worker0
def test_a_hook_over_what_stays_and_what_is_sent_runs_once(mode: Any) -> None:
    here, sent, seen = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []
    register_multi_grad_hook((here, sent), lambda grads: seen.append(grads), mode=mode)
    with dist_autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", torch.mul, (sent, 2))
        dist_autograd.backward(context_id, [(result + here * 3).sum()])
    (grads,) = seen
    if mode == "all":
        assert [grad.tolist() for grad in grads] == [[3.0] * 3, [2.0] * 3]


@from_worker0
def test_what_a_hook_keeps_stays_as_it_is() -> None:
    """A hook before the node of a leaf, and one of the leaf: later passes add to gradients of the context."""
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    node: Any = leaves[0].view_as(leaves[0]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen: list[Tensor] = []
    node.register_prehook(lambda grads: seen.append(grads[0]))
    leaves[1].register_hook(lambda grad: seen.append(grad))
    with dist_autograd.context() as context_id:
        for _ in range(3):
            result = rpc.rpc_sync("worker1", torch.add, (leaves[0], leaves[1]))
            dist_autograd.backward(context_id, [result.sum()])
        found = dist_autograd.get_gradients(context_id)
        total = found[leaves[0]] + found[leaves[1]]
    assert [grad.tolist() for grad in seen] == [[1.0] * 3] * 6
    assert total.tolist() == [6.0] * 3


_was_changed = threading.Event()


def change(way: str) -> None:
    kept = _kept_ways.pop(way)
    changed = kept() if isinstance(kept, weakref.ref) else kept
    if changed is not None:
        changed.mul_(10)
    _was_changed.set()


_kept_ways: dict[str, Any] = {}


def compute(way: str) -> Tensor:
    """A result that can be changed afterwards, in one of several ways."""
    result = make("start") * 2
    if way == "itself":
        _kept_ways[way] = result
    elif way == "a view of it":
        _kept_ways[way] = result[:]
    elif way == "what it is a view of":
        _kept_ways[way], result = result, result[:]
    elif way == "a weak reference":
        _kept_ways[way] = weakref.ref(result)
    else:
        _kept_ways[way] = None
    return result


_WAYS = ["itself", "a view of it", "what it is a view of", "a weak reference", "none"]


@pytest.mark.parametrize("way", _WAYS)
@from_worker0
def test_what_is_done_to_a_result_once_it_has_come_is_not_part_of_it(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The next call changes it in place where it was computed, while the thread that sent it lags behind."""
    _was_changed.clear()
    on_sent = GraphTracker.on_sent

    def lag(tracker: GraphTracker, *args: Any) -> None:
        if tracker._agent.info.id == 1:
            _was_changed.wait(20)
        on_sent(tracker, *args)

    monkeypatch.setattr(GraphTracker, "on_sent", lag)
    with dist_autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", compute, (way,))
        rpc.rpc_sync("worker1", change, (way,))
        dist_autograd.backward(context_id, [result.sum()])
        found = rpc.rpc_sync("worker1", gradient, (context_id, "start"))
    assert found is not None
    assert found.tolist() == [2.0] * 3


class Inner(torch.autograd.Function):
    """Computes on another worker, and runs a backward of its own through that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.result = rpc.rpc_sync("worker1", torch.mul, (ctx.x, 2))
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.autograd.backward([ctx.result], [grad])
        return grad * 0


@from_worker0
def test_a_backward_within_the_backward_gives_gradients_away() -> None:
    with dist_autograd.context() as context_id:
        result = Inner.apply(torch.ones(3, requires_grad=True))
        dist_autograd.backward(context_id, [result.sum()])  # type: ignore[union-attr]
        found = dist_autograd.get_gradients(context_id)
    assert sorted(grad.sum().item() for grad in found.values()) == [0.0, 6.0]


def keep(x: Tensor) -> None:
    _kept["x"] = x


def add_kept(x: Tensor) -> Tensor:
    return _kept["x"] + x


@from_worker0
def test_what_a_hook_has_seen_is_not_the_contexts() -> None:
    """One gradient comes for a leaf and for what was computed, in one message."""
    leaf, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    seen: list[Tensor] = []
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", keep, (leaf,))
        computed = other * 2
        computed.register_hook(seen.append)
        loss = (rpc.rpc_sync("worker1", add_kept, (computed,)) * 3).sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        total = dist_autograd.get_gradients(context_id)[leaf]
    assert [grad.tolist() for grad in seen] == [[3.0] * 3] * 2
    assert total.tolist() == [6.0] * 3
