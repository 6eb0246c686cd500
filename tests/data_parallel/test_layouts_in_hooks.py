"""Gradients that lie otherwise than contiguous, and hooks that share a group: what a bucket says is so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.ranks import run_on
from weft.comm_hooks import ddp_zero_hook, default_hooks, optimizer_overlap_hooks
from weft.comm_hooks.in_order import queue_of, run_in_order
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook

pytestmark = run_on(threads=2)


class Strided(nn.Module):
    """A channels_last convolution and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        conv: Any = nn.Conv2d(3, 4, 2)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.zeros(5, 4).t())
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).mean((2, 3)) @ self.matrix


def images(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(2, 3, 5, 5, generator=generator)


def loss_of(module: nn.Module, rank: int) -> torch.Tensor:
    return module(images(rank)).square().mean()


def stepped_alone(lr: float) -> nn.Module:
    single = Strided()
    torch.stack([loss_of(single, rank) for rank in range(2)]).mean().backward()
    torch.optim.SGD(single.parameters(), lr=lr).step()
    return single


def assert_same(module: nn.Module, right: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, param), wanted in zip(module.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=tolerance, atol=tolerance, msg=name)


def test_a_bucket_gives_gradients_as_they_are() -> None:
    seen: dict[torch.Tensor, torch.Tensor] = {}

    def hook(state: object, bucket: weft.GradBucket) -> Any:
        seen.update(
            (param, grad.clone()) for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        )
        return default_hooks.allreduce_hook(None, bucket)

    model = weft.DistributedDataParallel(Strided())
    model.register_comm_hook(None, hook)
    bare = copy.deepcopy(model.module)
    loss_of(model, dist.get_rank()).backward()
    loss_of(bare, dist.get_rank()).backward()
    for param, own in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(seen[param], own.grad)


def test_zero_steps_with_them() -> None:
    model = weft.DistributedDataParallel(Strided())
    zero = weft.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(
        None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
    )
    loss_of(model, dist.get_rank()).backward()
    assert_same(model.module, stepped_alone(0.1))


def test_optimizers_of_hooks_step_with_them() -> None:
    model = weft.DistributedDataParallel(Strided())
    functional = optimizer_overlap_hooks.PerParameterOptimizer(torch.optim.SGD, lr=0.1)
    state = optimizer_overlap_hooks._OptimizerHookState(functional)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    loss_of(model, dist.get_rank()).backward()
    assert_same(model.module, stepped_alone(0.1))


@pytest.mark.parametrize(
    "wrap", [ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved]
)
def test_zero_shares_behind_hooks_of_several_collectives(wrap: Any) -> None:
    """One rank's hooks are held up, so that its shares could overtake them."""
    model = weft.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))), bucket_cap_mb=0.001
    )
    zero = weft.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01)
    group = model.process_group

    def hook(state: Any, bucket: weft.GradBucket) -> Any:
        if dist.get_rank() == 1:
            run_in_order(group, bucket.buffer(), lambda: sum(range(100_000)))
        return quantization_perchannel_hook(None, bucket)

    model.register_comm_hook(None, wrap(hook, model, zero))
    for _ in range(3):
        model(torch.ones(2, 40)).sum().backward()
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(2)]
        dist.all_gather(others, param.detach())
        assert torch.equal(others[0], others[1])


def test_a_queue_outlives_a_body_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(dist.group.WORLD)
    tensor = torch.zeros(1)

    def fail(task: object) -> Any:
        raise OSError("no stream")

    queue._on_stream = fail  # type: ignore[method-assign]
    future = run_in_order(dist.group.WORLD, tensor, lambda: 1)
    with pytest.raises(OSError, match="no stream"):
        future.wait()
    del queue._on_stream
    assert run_in_order(dist.group.WORLD, tensor, lambda: 2).wait() == 2
    assert queue.is_idle


def test_a_dense_gradient_of_a_sparse_parameter_is_filled() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(table.weight)
    model = weft.DistributedDataParallel(table)
    for _ in range(2):
        table.weight.grad = torch.zeros(4, 2)
        given = table.weight.grad
        model(torch.tensor([dist.get_rank()])).sum().backward()
        assert table.weight.grad is given
        assert given.tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]]
