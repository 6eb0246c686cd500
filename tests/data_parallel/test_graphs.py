"""Graphs of many forms: tied parameters, several forwards and backwards, static graphs, double backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import weft_only
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    filled,
    make_rows,
    mean_square,
    net,
    rows_of,
    single_loss,
)
from tests.ranks import run_on

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, True])
CAP = pytest.mark.parametrize("cap", [0.0001, pytest.param(25, marks=FULL)])


def normed() -> nn.Module:
    # No bias in front of the norm: its gradient would be zero but for rounding.
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return filled(nn.Sequential(*layers))


@VIEW
@CAP
def test_tied_parameters(view: bool, cap: float) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)
            self.third = self.first  # a module under two names
            self.second.weight = self.first.weight  # a parameter under two names

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.third(torch.tanh(self.second(torch.tanh(self.first(rows)))))

    twin = Twin(filled(Tied()), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    assert len(list(twin.parallel.parameters())) == 3
    for step in range(3):
        twin.step(make_rows(step))


@VIEW
@CAP
def test_several_forwards_before_one_backward(view: bool, cap: float) -> None:
    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (model(rows) + 2 * model(rows * 2) + model(model(rows))).square().mean()

    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(3):
        twin.step(make_rows(step), loss)


@weft_only("broadcasts buffers into what the first forward has saved")
def test_several_forwards_before_one_backward_with_batch_norm_and_buffers_synced() -> None:
    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (model(rows) + model(rows * 2 + 1)).square().mean()

    twin = Twin(normed())
    for step in range(3):
        twin.step(make_rows(step), loss)


def test_several_forwards_before_one_backward_with_batch_norm_and_buffers_local() -> None:
    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (model(rows) + model(rows * 2 + 1)).square().mean()

    twin = Twin(normed(), forward_sync_buffers=False)
    for step in range(3):
        twin.step(make_rows(step), loss)


@weft_only("leaves the gradients of the second backward local")
@VIEW
def test_two_forwards_then_two_backwards(view: bool) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view)
    for step in range(2):
        rows = make_rows(step)
        for model, part in ((twin.single, rows), (twin.parallel, rows_of(rows, dist.get_rank()))):
            first, second = mean_square(model, part, 0), mean_square(model, part * 3, 0)
            first.backward()
            second.backward()
        twin.check()
        twin.update()


@VIEW
@CAP
def test_a_backward_for_each_forward_accumulates(view: bool, cap: float) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check()


@weft_only("leaves the gradients of the second backward local")
@VIEW
def test_retain_graph_and_backward_again(view: bool) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view)
    for step in range(2):
        rows = make_rows(step)
        for model, part in ((twin.single, rows), (twin.parallel, rows_of(rows, dist.get_rank()))):
            output = model(part)
            output.square().mean().backward(retain_graph=True)
            (output * 3).sin().mean().backward()
        twin.check()
        twin.update()


@VIEW
@CAP
def test_static_graph_with_unused_parameters(view: bool, cap: float) -> None:
    twin = Twin(Branches("abc"), static_graph=True, gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(3):
        twin.backward(make_rows(step), loss_by_rank("ab"))
        twin.check()
        twin.update()


def test_set_static_graph_after_construction() -> None:
    twin = Twin(net())
    twin.parallel._set_static_graph()
    for step in range(3):
        twin.step(make_rows(step))


@VIEW
def test_gradient_penalty(view: bool) -> None:
    """autograd.grad with respect to the input, inside of what is then differentiated."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        output = model(rows).square().mean()
        (slope,) = torch.autograd.grad(output, rows, create_graph=True)
        return output + (slope.norm(dim=1) - 1).square().mean()

    twin = Twin(net(), gradient_as_bucket_view=view)
    for step in range(3):
        twin.step(make_rows(step), loss)


def test_autograd_grad_of_the_input_alone_touches_no_parameter() -> None:
    twin = Twin(net())
    for step in range(2):
        rows = rows_of(make_rows(step), dist.get_rank()).clone().requires_grad_()
        (slope,) = torch.autograd.grad(twin.parallel(rows).sum(), rows)
        bare = rows.detach().clone().requires_grad_()
        (right,) = torch.autograd.grad(twin.single(bare).sum(), bare)
        torch.testing.assert_close(slope, right, rtol=0, atol=0)
        assert all(param.grad is None for param in twin.parallel.parameters())
        twin.step(make_rows(step + 10))


def test_a_forward_without_a_backward() -> None:
    """For its output's sake: evaluation, or a teacher."""
    twin = Twin(net())
    for step in range(3):
        twin.parallel(make_rows(step))
        with torch.no_grad():
            twin.parallel(make_rows(step))
        twin.parallel.eval()
        twin.parallel(make_rows(step))
        twin.parallel.train()
        twin.step(make_rows(step))


def test_two_models_in_one_loss() -> None:
    """As a GAN's: one's output is the other's input, each with buckets of its own."""
    lower, upper = Twin(net(2)), Twin(net(3))
    for step in range(3):
        rows = make_rows(step)
        single_loss(nn.Sequential(lower.single, upper.single), rows).backward()
        upper.parallel(lower.parallel(rows_of(rows, dist.get_rank()))).square().mean().backward()
        for twin in (lower, upper):
            twin.check()
            twin.update()


@run_on(threads=2)
@run_on(threads=4, full=True)
def test_control_flow_may_differ_in_depth() -> None:
    """Rank r runs the shared layer r + 1 times."""

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows, "a" * (rank + 1)).square().mean()

    twin = Twin(Branches("a"))
    for step in range(3):
        twin.step(make_rows(step), loss)
