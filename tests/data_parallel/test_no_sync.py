"""`no_sync` of every data-parallel strategy: gradients add up on their rank until the next reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import ON_TORCH, weft_only
from tests.data_parallel.strategies import WEFT, full, loss, net, right_gradients
from tests.data_parallel.twins import Twin, assert_same_gradients, make_rows, mean_square, rows_of
from tests.ranks import run_on

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, True])
CAP = pytest.mark.parametrize("cap", [0.0001, pytest.param(25, marks=FULL)])


@pytest.mark.parametrize("strategy", WEFT)
def test_no_sync_adds_gradients_up_for_the_next_reduction(strategy: str) -> None:
    model, rank = WEFT[strategy](net()), dist.get_rank()
    for _ in range(2):
        with model.no_sync(), weft.record() as events:
            loss(model, rank).backward()
        with model.no_sync(enabled=True):
            loss(model, rank).mul(2).backward()
        assert not any("reduce" in event.op for event in events)
        with model.no_sync(enabled=False):
            loss(model, rank).mul(3).backward()
        for param, right in zip(model.parameters(), right_gradients(), strict=True):
            torch.testing.assert_close(full(param.grad), 6 * right, rtol=1e-10, atol=1e-12)
        model.zero_grad()


def test_no_sync_goes_back_to_what_each_module_was_set_to() -> None:
    model: Any = net()
    weft.fully_shard(model[0])
    weft.fully_shard(model)
    model[0].set_requires_gradient_sync(False)
    with model.no_sync():
        pass
    loss(model, dist.get_rank()).backward()
    assert all(param.grad is None for param in model[0].parameters())
    assert all(param.grad is not None for param in model[2].parameters())


def test_no_sync_of_replicated_children_goes_back_too() -> None:
    model: Any = net()
    weft.replicate(model[0])
    weft.replicate(model)
    model[0].set_requires_gradient_sync(False)
    with model.no_sync():
        loss(model, dist.get_rank()).backward()
    local = net()
    loss(local, dist.get_rank()).backward()
    for param, right in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(param.grad, right.grad, rtol=1e-10, atol=1e-12)
    model.zero_grad()
    loss(model, dist.get_rank()).backward()
    for param, right in zip(model[0].parameters(), local[0].parameters(), strict=True):
        torch.testing.assert_close(param.grad, right.grad, rtol=1e-10, atol=1e-12)


# -- of DistributedDataParallel ---------------------------------------------------------------


@VIEW
@CAP
def test_no_sync_accumulates_here_and_the_next_backward_reduces_it_all(view: bool, cap: float) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(3):
        local = net()
        local.load_state_dict(twin.single.state_dict())
        with twin.parallel.no_sync():
            for part in range(2):
                rows = make_rows(10 * step + part)
                twin.backward(rows)
                mean_square(local, rows_of(rows, dist.get_rank()), 0).backward()
        assert_same_gradients(twin.parallel, local)  # nothing has been reduced
        twin.backward(make_rows(10 * step + 5))
        twin.check()
        twin.update()


@pytest.mark.skipif(ON_TORCH, reason="torch's calls are not recorded")
def test_no_sync_communicates_nothing() -> None:
    twin = Twin(net())
    twin.step(make_rows(0))
    with weft.record() as events, twin.parallel.no_sync():
        twin.backward(make_rows(1))
    assert events == []
    with weft.record() as events:
        twin.backward(make_rows(2))
    assert events
    twin.check()


def test_no_sync_ends_with_an_exception() -> None:
    twin = Twin(net())
    with pytest.raises(KeyError), twin.parallel.no_sync():
        raise KeyError
    twin.step(make_rows(0))


@weft_only("has no enabled=")
def test_no_sync_that_is_not_enabled_syncs() -> None:
    twin = Twin(net())
    for step in range(2):
        with twin.parallel.no_sync(enabled=False):
            twin.backward(make_rows(step))
        twin.check()
        with twin.parallel.no_sync(enabled=True):
            twin.backward(make_rows(step + 10))
        twin.backward(make_rows(step + 20))
        twin.check()
        twin.update()


@weft_only("crashes, or silently stops reducing")
@VIEW
def test_static_graph_with_no_sync(view: bool) -> None:
    twin = Twin(net(), static_graph=True, gradient_as_bucket_view=view)
    for step in range(4):
        with twin.parallel.no_sync():
            twin.backward(make_rows(10 * step))
        twin.backward(make_rows(10 * step + 1))
        twin.check()
        twin.update()
        twin.step(make_rows(10 * step + 2))
