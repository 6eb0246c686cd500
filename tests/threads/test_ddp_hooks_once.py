"""Post-accumulate hooks run once a step and see the mean, however the backward began."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.testing import on_ranks


class Keeps(nn.Module):
    """Keeps its loss; returns its output only if it `shows` it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.shows = True
        self.losses: list[torch.Tensor] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor | None:
        output = self.b(self.a(rows))
        self.losses = [output.sum()]
        return output if self.shows else None


def my_rows() -> torch.Tensor:
    return torch.full((2, 3), dist.get_rank() + 1.0)


def count_calls(module: nn.Module) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    return seen


def calls_of(model: DistributedDataParallel, seen: list[torch.Tensor]) -> int:
    seen.clear()
    model.zero_grad()
    model(my_rows())
    model.module.losses[0].backward()
    return len(seen)


@on_ranks(2)
def test_hooks_run_once_after_the_module_was_wrapped_again() -> None:
    module = Keeps()
    seen = count_calls(module)
    model = DistributedDataParallel(module)
    assert calls_of(model, seen) == 2
    del model
    gc.collect()
    assert calls_of(DistributedDataParallel(module), seen) == 2


@on_ranks(2)
def test_hooks_from_before_wrapping_run_once_where_the_loss_is_hidden() -> None:
    module = Keeps()
    module.shows = False
    seen = count_calls(module)
    model = DistributedDataParallel(module)
    assert [calls_of(model, seen) for _ in range(3)] == [2, 2, 2]


@on_ranks(2)
def test_hooks_run_once_where_the_loss_is_hidden_later_on() -> None:
    model = DistributedDataParallel(Keeps())
    seen = count_calls(model.module)
    counts: list[int] = []
    for shows in (True, True, False, True, False):
        model.module.shows = shows
        try:
            counts.append(calls_of(model, seen))
        except RuntimeError as error:  # or an error that says so, in the step where it happens
            if "outputs of forward" not in str(error):
                raise
            return
    assert counts == [2] * 5


@on_ranks(2)
def test_autograd_grad_after_no_sync_communicates_nothing() -> None:
    model = DistributedDataParallel(Keeps())
    seen = count_calls(model.module)
    calls_of(model, seen)
    model.zero_grad()
    with model.no_sync():
        model(my_rows()).sum().backward()
    local = model.module.a.weight.grad.clone()
    seen.clear()
    rows = my_rows().requires_grad_()
    torch.autograd.grad(model(rows).sum(), rows)
    assert not seen
    assert torch.equal(model.module.a.weight.grad, local)


@pytest.mark.parametrize("layer", ["a", "b"])
@on_ranks(2)
def test_a_hidden_loss_of_some_layers_is_reduced_or_refused(layer: str) -> None:
    class Parts(Keeps):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.parts = {"a": [self.a(rows).sum()], "b": [self.b(rows).sum()]}
            return self.b(self.a(rows))

    model = DistributedDataParallel(Parts())
    for _ in range(2):
        model.zero_grad()
        model(my_rows()).sum().backward()
    model.zero_grad()
    model(my_rows())
    model.module.parts[layer][0].backward()
    # The columns of two rows of ones, and of twos: 2 and 4.
    if torch.equal(getattr(model.module, layer).weight.grad, torch.full((3, 3), 3.0)):
        return
    # Nobody who calls back has come, so it is noticed one step late.
    with pytest.raises(RuntimeError, match="outputs of forward"):
        model(my_rows())
