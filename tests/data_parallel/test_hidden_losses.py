"""Backwards that don't come through the outputs of a forward alone: all gradients are reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.ranks import run_on
from weft import DistributedDataParallel

pytestmark = run_on(threads=2)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 1)
        self.kept: list[torch.Tensor] = []


class HidesTwoLosses(Chain):
    def forward(self, rows: torch.Tensor) -> None:
        output = self.c(self.b(self.a(rows)))
        self.kept = [output.sum(), output.square().sum()]


class HidesBehindCheckpoints(Chain):
    def forward(self, rows: torch.Tensor) -> None:
        middle = checkpoint(self.b, self.a(rows), use_reentrant=True)
        self.kept = [checkpoint(self.c, middle, use_reentrant=True).sum()]


class Critic(Chain):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(rows)).tanh())


def my_rows() -> torch.Tensor:
    return torch.full((2, 3), dist.get_rank() + 1.0)


def assert_mean(module: Chain, run_step: Callable[[nn.Module, Chain], None]) -> None:
    """The step's gradients, three times, are the mean of those of single modules."""
    model = DistributedDataParallel(module, bucket_cap_mb=0)
    for _ in range(3):
        model.zero_grad()
        run_step(model, module)
        module.kept = []
        single = copy.deepcopy(module)
        single.zero_grad()
        run_step(single, single)
        for (name, param), alone in zip(module.named_parameters(), single.parameters(), strict=True):
            mean = alone.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad, mean / 2, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("default")
@run_on()
@pytest.mark.threads
def test_the_second_hidden_loss_of_a_forward_stays_local_and_is_told_of() -> None:
    def body() -> None:
        module = HidesTwoLosses()
        model = DistributedDataParallel(module, bucket_cap_mb=0)
        model(my_rows())
        module.kept[0].backward(retain_graph=True)
        module.kept[1].backward()

    with pytest.warns(UserWarning, match="no forward of the wrapped module led to"):
        weft.launch(body, ranks=2, kind="thread", timeout=60)


def test_a_hidden_loss_behind_reentrant_checkpoints_is_reduced() -> None:
    def run_step(model: nn.Module, module: Chain) -> None:
        model(my_rows())
        module.kept[0].backward()

    assert_mean(HidesBehindCheckpoints(), run_step)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_gradient_penalty_of_its_own_is_reduced(is_first: bool) -> None:
    def run_step(model: nn.Module, module: Chain) -> None:
        if not is_first:
            model(my_rows()).mean().backward()
        rows = my_rows().requires_grad_()
        (grad,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        (grad.square().sum() + 0 * module.c.bias.sum()).backward()

    assert_mean(Critic(), run_step)


class Balanced(Chain):
    """Returns its output and keeps a loss of a layer that the output doesn't need."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.b(self.a(rows))
        self.kept.append(self.c(rows).square().sum())
        return output


def test_kept_losses_of_two_forwards_with_two_backwards_are_reduced() -> None:
    def run_step(model: nn.Module, module: Chain) -> None:
        outputs = [model(my_rows()), model(my_rows() * 2)]
        for output, kept in zip(outputs, module.kept, strict=True):
            (output.sum() + kept).backward()

    assert_mean(Balanced(), run_step)


def test_a_kept_loss_is_reduced_in_a_second_backward_of_the_graph() -> None:
    def run_step(model: nn.Module, module: Chain) -> None:
        loss = model(my_rows()).sum() + module.kept[0]
        loss.backward(retain_graph=True)
        loss.backward()

    assert_mean(Balanced(), run_step)


def test_a_kept_loss_is_reduced_after_autograd_grad() -> None:
    def run_step(model: nn.Module, module: Chain) -> None:
        rows = my_rows().requires_grad_()
        loss = model(rows).sum() + module.kept[0]
        torch.autograd.grad(loss, rows, retain_graph=True)
        loss.backward()

    assert_mean(Balanced(), run_step)


def test_kept_losses_under_no_sync_bring_no_warning() -> None:
    module = Balanced()
    model = DistributedDataParallel(module, bucket_cap_mb=0)
    for _ in range(3):
        with model.no_sync():
            outputs = [model(my_rows()), model(my_rows())]
            for output, kept in zip(outputs, module.kept, strict=True):
                (output.sum() + kept).backward()  # a warning is an error here
        module.kept = []
