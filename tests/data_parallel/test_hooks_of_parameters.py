"""The user's post-accumulate hooks: they run once a step and see the mean, however the backward began."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.ranks import run_on
from weft import DistributedDataParallel

pytestmark = run_on(threads=2)

with warnings.catch_warnings():  # torch's module uses a deprecated part of torch
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import _apply_optimizer_in_backward

RANKS = 2


def make_net() -> Any:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(7)
    for param in net.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return net


def rows(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * RANKS, 3, generator=generator, dtype=torch.float64)


def own_rows(step: int) -> torch.Tensor:
    return rows(step)[2 * dist.get_rank() :][:2]


def step_in_backward(params: Any) -> list[Any]:
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.5) for param in params}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        param.grad = None

    return [param.register_post_accumulate_grad_hook(step) for param in optimizers]


@pytest.mark.parametrize("cap", [0.0001, 25])
@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_an_optimizer_in_a_hook_steps_with_the_mean(cap: float, is_wrapped_first: bool) -> None:
    single = make_net()
    net = copy.deepcopy(single)
    if not is_wrapped_first:
        step_in_backward(net.parameters())
    model = weft.DistributedDataParallel(net, bucket_cap_mb=cap)
    if is_wrapped_first:
        step_in_backward(net.parameters())
    step_in_backward(single.parameters())
    for step in range(4):
        model(own_rows(step)).square().mean().backward()
        single(rows(step)).square().mean().backward()
        for param, right in zip(net.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(param, right, rtol=1e-12, atol=1e-13)
            assert param.grad is None


def test_weft_optimizers_in_backward_do_too() -> None:
    single, net = make_net(), make_net()
    for one in (single, net):
        weft.optimizers.apply_optimizer_in_backward(torch.optim.AdamW, one.parameters(), {"lr": 0.05})
    model = weft.replicate(net)
    for step in range(4):
        model(own_rows(step)).square().mean().backward()
        single(rows(step)).square().mean().backward()
    for param, right in zip(net.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(param, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_torch_optimizers_in_backward_do_too(is_wrapped_first: bool) -> None:
    """Two on each parameter, and one of the parameters isn't reduced: its optimizers step as ever."""
    single, net = make_net(), make_net()
    net.register_parameter("own", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    weft.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own"])
    model = None if is_wrapped_first else weft.DistributedDataParallel(net)
    for one in (single, net):
        for rate in (0.05, 0.1):
            _apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": rate / 2})
    model = model or weft.DistributedDataParallel(net)
    for step in range(4):
        (model(own_rows(step)).square().mean() + net.own.sum()).backward()
        single(rows(step)).square().mean().backward()
    for name, right in single.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), right, rtol=1e-9, atol=1e-10)
        assert net.get_parameter(name).grad is None
    assert net.own.grad is None
    assert net.own.max() < 1


def test_without_a_reduction_hooks_run_as_ever() -> None:
    model: Any = weft.DistributedDataParallel(make_net())
    seen: list[int] = []
    handle = model.module[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(seen)))
    with model.no_sync():
        model(own_rows(0)).sum().backward()
    assert seen == [0]
    model(own_rows(0)).sum().backward()
    model(own_rows(1)).sum().backward()
    assert seen == [0, 1, 2]
    handle.remove()
    model(own_rows(1)).sum().backward()
    assert seen == [0, 1, 2]


def test_a_hook_of_a_parameter_that_only_a_peer_used_runs_too() -> None:
    model: Any = weft.DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    model.module.forward = lambda which: model.module[which](torch.ones(1, 2))  # type: ignore[method-assign]
    seen: list[str] = []
    for name in ("a", "b"):
        weight = model.module[name].weight
        weight.register_post_accumulate_grad_hook(lambda param, name=name: seen.append(name))
    for _ in range(3):
        model("a" if dist.get_rank() else "b").sum().backward()
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3


def test_a_model_that_is_gone_leaves_the_hooks_to_autograd() -> None:
    net = make_net()
    model = weft.DistributedDataParallel(net)
    seen: list[torch.Tensor] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    model(own_rows(0)).sum().backward()
    del model
    net.zero_grad()
    net(own_rows(0)).sum().backward()
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])  # the mean, then this rank's own


# -- once a step -------------------------------------------------------------------------------


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


def calls_of(model: Any, seen: list[torch.Tensor]) -> int:
    seen.clear()
    model.zero_grad()
    model(my_rows())
    model.module.losses[0].backward()
    return len(seen)


def test_hooks_run_once_after_the_module_was_wrapped_again() -> None:
    module = Keeps()
    seen = count_calls(module)
    model = DistributedDataParallel(module)
    assert calls_of(model, seen) == 2
    del model
    gc.collect()
    assert calls_of(DistributedDataParallel(module), seen) == 2


def test_hooks_from_before_wrapping_run_once_where_the_loss_is_hidden() -> None:
    module = Keeps()
    module.shows = False
    seen = count_calls(module)
    model = DistributedDataParallel(module)
    assert [calls_of(model, seen) for _ in range(3)] == [2, 2, 2]


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


def test_autograd_grad_after_no_sync_communicates_nothing() -> None:
    model: Any = DistributedDataParallel(Keeps())
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
def test_a_hidden_loss_of_some_layers_is_reduced_or_refused(layer: str) -> None:
    class Parts(Keeps):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.parts = {"a": [self.a(rows).sum()], "b": [self.b(rows).sum()]}
            return self.b(self.a(rows))

    model: Any = DistributedDataParallel(Parts())
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
