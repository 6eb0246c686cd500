"""The user's own hooks on reduced parameters see the mean."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing import on_ranks

RANKS = 2


def make_net() -> nn.Module:
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
@on_ranks(RANKS)
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


@on_ranks(RANKS)
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


@on_ranks(RANKS)
def test_without_a_reduction_hooks_run_as_ever() -> None:
    model = weft.DistributedDataParallel(make_net())
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


@on_ranks(RANKS)
def test_a_hook_of_a_parameter_that_only_a_peer_used_runs_too() -> None:
    model = weft.DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    model.module.forward = lambda which: model.module[which](torch.ones(1, 2))  # type: ignore[method-assign]
    seen: list[str] = []
    for name in ("a", "b"):
        weight = model.module[name].weight
        weight.register_post_accumulate_grad_hook(lambda param, name=name: seen.append(name))
    for _ in range(3):
        model("a" if dist.get_rank() else "b").sum().backward()
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3


@on_ranks(RANKS)
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
