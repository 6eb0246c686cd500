"""Hooks on a data-parallel model: gradients of several buckets, training that converges, uneven use."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.ranks import run_on
from weft.comm_hooks import DDPCommHookType, chain, default_hooks, register_ddp_comm_hook
from weft.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from weft.comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from weft.comm_hooks.quantization_hooks import QuantizationState, quantization_perchannel_hook
from weft.testing.models import fill_parameters

SMALL_BUCKETS = 0.004  # MB: a bucket a layer


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4))
    fill_parameters(net, 0)
    return net


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 24, generator=generator)
    return inputs, torch.stack([inputs[:, :4].sum(1), inputs[:, 0], inputs[:, 1].sin(), inputs[:, 2] ** 2], 1)


def loss_of(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def whole_gradients(net: nn.Module, step: int) -> list[torch.Tensor]:
    """The mean of all ranks' gradients, computed here."""
    net.zero_grad()
    losses = [loss_of(net, make_batch(step, rank)) for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]


CASES: dict[str, tuple[DDPCommHookType, float]] = {
    "allreduce": (DDPCommHookType.ALLREDUCE, 1e-6),
    "fp16": (DDPCommHookType.FP16_COMPRESS, 2e-3),
    "bf16": (DDPCommHookType.BF16_COMPRESS, 1.5e-2),
    "per tensor": (DDPCommHookType.QUANTIZE_PER_TENSOR, 1.2e-2),
    "per channel": (DDPCommHookType.QUANTIZE_PER_CHANNEL, 1.2e-2),
    "power sgd": (DDPCommHookType.POWER_SGD, 1e-6),  # a thousand plain steps at first
    "batched power sgd": (DDPCommHookType.BATCHED_POWER_SGD_RANK2, 1e-6),
}
# Of these and of those below, one for each way through the code.
EVERYDAY = ("allreduce", "fp16", "per channel", "power sgd", "int8", "power in 16 bits", "local")


def each(names: Iterable[str]) -> Any:
    full = pytest.mark.full
    params = [pytest.param(name, marks=() if name in EVERYDAY else full) for name in names]
    return pytest.mark.parametrize("name", params)


@run_on(threads=2)
@each(CASES)
@pytest.mark.parametrize("view", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gradients_of_several_buckets(name: str, view: bool) -> None:
    kind, tolerance = CASES[name]
    bare = make_net()
    model = weft.DistributedDataParallel(
        copy.deepcopy(bare), bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=view
    )
    register_ddp_comm_hook(kind, model)
    for step in range(3):
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        for param, right in zip(model.parameters(), whole_gradients(bare, step), strict=True):
            atol = tolerance * right.abs().max().item()
            torch.testing.assert_close(param.grad, right, rtol=0, atol=atol)
        model.zero_grad()


@run_on(threads=2)
def test_noop_keeps_each_ranks_own() -> None:
    bare = make_net()
    model = weft.DistributedDataParallel(copy.deepcopy(bare))
    register_ddp_comm_hook(DDPCommHookType.NOOP, model)
    loss_of(model, make_batch(0, dist.get_rank())).backward()
    loss_of(bare, make_batch(0, dist.get_rank())).backward()
    for param, own in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(param.grad, own.grad)


def compressing_hooks() -> dict[str, tuple[Any, Any]]:
    power = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
    return {
        "int8": (QuantizationState(error_feedback=True), quantization_perchannel_hook),
        "fp8": (
            QuantizationState(dtype=torch.float8_e4m3fn, error_feedback=True),
            quantization_perchannel_hook,
        ),
        "power": (PowerSGDState(None, matrix_approximation_rank=2, **power), powerSGD_hook),
        "batched": (PowerSGDState(None, matrix_approximation_rank=4, **power), batched_powerSGD_hook),
        "power in 16 bits": (
            None,
            chain(default_hooks.bf16_compress_wrapper, (PowerSGDState(None, 2, **power), powerSGD_hook)),
        ),
        "local": (PostLocalSGDState(None, None, 3), post_localSGD_hook),
    }


def train(model: nn.Module, num_steps: int = 60) -> float:
    """Train and return the loss over all ranks' last batches; ranks must agree on the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        optimizer.step()
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.detach())
        assert all(torch.equal(other, param) for other in others)
    with torch.no_grad():
        return torch.stack([loss_of(model, make_batch(999, rank)) for rank in range(4)]).mean().item()


@run_on(threads=2)
@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.full)
        for name in compressing_hooks()
    ],
)
def test_training_converges_as_without_a_hook(name: str) -> None:
    state, hook = compressing_hooks()[name]
    plain = weft.DistributedDataParallel(make_net())
    model = weft.DistributedDataParallel(make_net(), bucket_cap_mb=SMALL_BUCKETS)
    model.register_comm_hook(state, hook)
    before = train(plain, 0)
    right, seen = train(plain), train(model)
    assert right < before / 2
    assert seen < before - 0.85 * (before - right)


@run_on(threads=2)
def test_a_parameter_that_one_rank_does_not_use() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.one = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.both(x) if dist.get_rank() else self.one(self.both(x))

    model: Any = weft.DistributedDataParallel(Branching(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, quantization_perchannel_hook)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        grad: torch.Tensor | None = model.module.one.weight.grad
        assert grad is not None
        gathered = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(gathered, grad)
        assert torch.equal(*gathered)
        assert grad.any()
        model.zero_grad()


@run_on(threads=2)
def test_two_models_with_different_hooks_in_one_backward() -> None:
    bare = [make_net(), nn.Linear(4, 4)]
    fill_parameters(bare[1], 1)
    models = [weft.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=SMALL_BUCKETS) for net in bare]
    models[0].register_comm_hook(None, quantization_perchannel_hook)
    models[1].register_comm_hook(None, default_hooks.allreduce_hook)
    both, single = nn.Sequential(*models), nn.Sequential(*bare)
    for step in range(3):
        loss_of(both, make_batch(step, dist.get_rank())).backward()
        for param, right in zip(both.parameters(), whole_gradients(single, step), strict=True):
            torch.testing.assert_close(param.grad, right, rtol=0, atol=1.2e-2 * right.abs().max().item())
        both.zero_grad()


@run_on(threads=2)
def test_replicate_takes_hooks_too() -> None:
    bare = make_net()
    model: Any = weft.replicate(copy.deepcopy(bare), bucket_cap_mb=SMALL_BUCKETS)
    model.register_comm_hook(QuantizationState(), quantization_perchannel_hook)
    for step in range(2):
        loss_of(model, make_batch(step, dist.get_rank())).backward()
        for param, right in zip(model.parameters(), whole_gradients(bare, step), strict=True):
            torch.testing.assert_close(param.grad, right, rtol=0, atol=1.2e-2 * right.abs().max().item())
        model.zero_grad()


# On a GPU


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))


@run_on(gpu_threads=2, timeout=60)
@pytest.mark.parametrize("hook", ["allreduce", "int8", "powersgd"])
# torch 2.11 gives it once a process, asked to check or not.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_pass_through(hook: str) -> None:
    """Hooks that can't compress them: they travel in order, as they are."""
    torch.cuda.set_device(0)
    model: Any = weft.DistributedDataParallel(Table().cuda(), bucket_cap_mb=0.0001)
    hooks: dict[str, tuple[Any, Any]] = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "int8": (None, quantization_perchannel_hook),
        "powersgd": (PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook),
    }
    model.register_comm_hook(*hooks[hook])
    single = Table().cuda()
    single.load_state_dict(model.module.state_dict())
    for _ in range(4):
        model.zero_grad()
        single.zero_grad()
        model(torch.tensor([dist.get_rank(), 3]).cuda()).sum().backward()
        for rank in range(2):
            (single(torch.tensor([rank, 3]).cuda()).sum() / 2).backward()
        found: torch.Tensor | None = model.module.rows.weight.grad
        right: torch.Tensor | None = single.rows.weight.grad
        assert found is not None
        assert right is not None
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), right.to_dense())
