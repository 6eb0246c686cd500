"""DistributedOptimizer: an optimizer on every owner, stepped together with a context's gradients."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist_autograd.leaves import (
    OPTIMIZERS,
    Planted,
    autograd,
    everyone,
    make_leaf,
    own,
    plant,
    quarters,
    scale,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import keep, kept, me
from tests.rpc.workers import Worker, wait_until, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


def optimizer_class(w: Worker) -> Any:
    return import_module(OPTIMIZERS[w.lib]).DistributedOptimizer


def rref_of(lib: str, key: str) -> Any:
    """A reference to the leaf itself, made by its owner."""
    return import_module(lib).RRef(kept(lib, key))


def rrefs_to(w: Worker, planted: list[Planted]) -> list[Any]:
    return [w.rpc.rpc_sync(each.worker, rref_of, (w.lib, each.key)) for each in planted]


def value_of(lib: str, key: str) -> Tensor:
    return kept(lib, key).detach().clone()


def forward(w: Worker, planted: list[Planted], x: Tensor) -> Tensor:
    y = x
    for each in planted:
        y = w.rpc.rpc_sync(each.worker, scale, (w.lib, each.key, y))
    return (y * y).sum()


@EVERYDAY
def test_steps_on_every_owner(worker: Worker) -> None:
    """As an optimizer of one worker would, with its state from step to step."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.25}),
        (torch.optim.SGD, {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.5}),
        (torch.optim.Adam, {"lr": 0.25}),
    ]
    for kind, options in kinds:
        planted = [plant(worker, to, 2 + i, 3, name=str(options)) for i, to in enumerate(everyone(worker))]
        copies = [each.value.detach().clone().requires_grad_() for each in planted]
        optimizer = optimizer_class(worker)(kind, rrefs_to(worker, planted), **options)
        local = kind(copies, **options)
        for step in range(3):
            x = quarters(step, 3)
            with autograd(worker.lib).context() as context_id:
                autograd(worker.lib).backward(context_id, [forward(worker, planted, x)])
                optimizer.step(context_id)
            local.zero_grad()
            y = x * copies[0] * copies[1] * copies[2]
            (y * y).sum().backward()
            local.step()
        for each, copy in zip(planted, copies, strict=True):
            found = worker.rpc.rpc_sync(each.worker, value_of, (worker.lib, each.key))
            assert not torch.equal(found, each.value.detach())
            torch.testing.assert_close(found, copy.detach(), rtol=1e-14, atol=1e-14)


def test_positional_options(worker: Worker) -> None:
    planted = [plant(worker, worker.next, 2, 3)]
    optimizer = optimizer_class(worker)(torch.optim.SGD, rrefs_to(worker, planted), 0.25)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [forward(worker, planted, torch.ones(3).double())])
        optimizer.step(context_id)
    found = worker.rpc.rpc_sync(worker.next, value_of, (worker.lib, planted[0].key))
    assert torch.equal(found, quarters(2, 3) * 0.5)


def test_parameters_without_a_gradient_stay(worker: Worker) -> None:
    planted = [plant(worker, to, 2, 3) for to in [worker.next, worker.after_next]]
    optimizer = optimizer_class(worker)(torch.optim.SGD, rrefs_to(worker, planted), lr=0.25, weight_decay=0.5)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [forward(worker, planted[:1], torch.ones(3).double())])
        # Every owner must know the context to be asked for its gradients.
        worker.rpc.rpc_sync(worker.after_next, own, (worker.lib, planted[1].key))
        optimizer.step(context_id)
    found = [worker.rpc.rpc_sync(each.worker, value_of, (worker.lib, each.key)) for each in planted]
    assert torch.equal(found[0], quarters(2, 3) * (1 - 0.25 * 2.5))
    assert torch.equal(found[1], quarters(2, 3))


def test_trainers_share_a_server(worker: Worker) -> None:
    """All workers step the parameters of one, each with an optimizer of its own, at the same time."""
    key, num_steps = "served", 10
    if worker.rank == 0:
        make_leaf(worker.lib, key, 60, (4,))
        keep(worker.lib, "is served", True)
    wait_until(
        lambda: worker.rpc.rpc_sync("worker0", is_kept, (worker.lib, "is served")), "the parameter is there"
    )
    rref = worker.rpc.rpc_sync("worker0", rref_of, (worker.lib, key))
    optimizer = optimizer_class(worker)(torch.optim.SGD, [rref], lr=0.25)
    for step in range(num_steps):
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(
                "worker0", scale, (worker.lib, key, quarters(worker.rank * 100 + step, 4))
            )
            autograd(worker.lib).backward(context_id, [y.sum()])
            optimizer.step(context_id)
    names = {f"worker{rank}" for rank in range(worker.size)}
    worker.rpc.api._barrier(names)
    found = worker.rpc.rpc_sync("worker0", value_of, (worker.lib, key))
    steps = sum(quarters(rank * 100 + step, 4) for rank in range(worker.size) for step in range(num_steps))
    assert torch.equal(found, quarters(60, 4) - 0.25 * steps)
    worker.rpc.api._barrier(names)


def is_kept(lib: str, key: str) -> bool:
    try:
        kept(lib, key)
    except KeyError:
        return False
    return True


def test_an_unknown_context(worker: Worker) -> None:
    planted = [plant(worker, worker.next, 2, 3)]
    optimizer = optimizer_class(worker)(torch.optim.SGD, rrefs_to(worker, planted), lr=0.25)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 987"):
        optimizer.step(987)
    found = worker.rpc.rpc_sync(worker.next, value_of, (worker.lib, planted[0].key))
    assert torch.equal(found, quarters(2, 3))


class Failing(torch.optim.SGD):
    """Says who it was."""

    def __init__(self, params: Any, lib: str, fails_at: list[str], when: str) -> None:
        super().__init__(params, lr=0.25)
        self.lib, self.fails_at = lib, fails_at
        if when == "made" and me(lib) in fails_at:
            raise ValueError(f"made by {me(lib)}")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if me(self.lib) in self.fails_at:
            raise ValueError(f"stepped by {me(self.lib)}")


def test_an_error_of_one_owner(worker: Worker) -> None:
    planted = [plant(worker, to, 2, 3) for to in everyone(worker)]
    rrefs = rrefs_to(worker, planted)
    with pytest.raises(Exception, match=f"made by {worker.next}"):
        optimizer_class(worker)(Failing, rrefs, worker.lib, [worker.next], "made")
    optimizer = optimizer_class(worker)(Failing, rrefs, worker.lib, [worker.next], "stepped")
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [forward(worker, planted, torch.ones(3).double())])
        with pytest.raises(Exception, match=f"stepped by {worker.next}"):
            optimizer.step(context_id)


@weft_only
def test_errors_of_all_owners(worker: Worker) -> None:
    """One error that has each worker's, and the others have stepped."""
    planted = [plant(worker, to, 2, 3) for to in everyone(worker)]
    rrefs = rrefs_to(worker, planted)
    bad = [worker.next, worker.after_next]
    with pytest.raises(RuntimeError) as caught:
        optimizer_class(worker)(Failing, rrefs, worker.lib, bad, "made")
    assert [f"made by {each}" in str(caught.value) for each in bad] == [True, True], caught.value
    optimizer = optimizer_class(worker)(Failing, rrefs, worker.lib, bad, "stepped")
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [forward(worker, planted, torch.ones(3).double())])
        with pytest.raises(RuntimeError) as caught:
            optimizer.step(context_id)
    assert [f"stepped by {each}" in str(caught.value) for each in bad] == [True, True], caught.value
    for each in planted:
        found = worker.rpc.rpc_sync(each.worker, value_of, (worker.lib, each.key))
        assert not torch.equal(found, each.value.detach())
