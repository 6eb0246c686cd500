"""Every DDPCommHookType against a single process.

A hook compared with no hook would agree on gradients that nobody syncs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel, weft_only
from tests.data_parallel.twins import all_ranks, rows_of
from tests.ranks import run_on

pytestmark = [
    run_on(threads=2),
    run_on(threads=4, gloo_threads=(2, 4), full=True),
    run_on(weft=(2, 4), gloo=(2, 4), full=True),
]

if ON_TORCH:
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
else:
    from weft.comm_hooks import DDPCommHookType, register_ddp_comm_hook

SHAPE = (40, 20)


class Task(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.p * x


class Powers(nn.Module):
    """Raises its input to a power of the rank, so that every rank has another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.t0 = Task()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.t0(x ** (1 + rank))


def make_input() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2020))


def local_gradient(rank: int) -> torch.Tensor:
    """What one process gets for a rank's part alone."""
    model: Any = Powers()
    model(make_input(), rank).mean().backward()
    return model.t0.p.grad


def right_gradient() -> torch.Tensor:
    """What a single process gets for the parts of all ranks."""
    model: Any = Powers()
    ranks = range(dist.get_world_size())
    torch.stack([model(make_input(), rank).mean() for rank in ranks]).mean().backward()
    return model.t0.p.grad


def gradient(hook_type: Any = None) -> torch.Tensor:
    """The gradient under DDP, with a hook of that type."""
    group = dist.group.WORLD
    model = DistributedDataParallel(Powers(), process_group=group)
    if hook_type is not None:
        register_ddp_comm_hook(comm_hook_type=hook_type, model=model, state=group)
    model(make_input(), dist.get_rank()).mean().backward()
    (param,) = model.parameters()
    assert param.grad is not None
    return param.grad


def check(seen: torch.Tensor, allowed: float) -> None:
    """Compare with the single process, and the ranks with each other to the bit."""
    right = right_gradient()
    apart = (seen - right).abs().max().item()
    assert apart <= allowed * right.abs().max().item(), (apart, right.abs().max())
    for rank, other in enumerate(all_ranks(seen)):
        assert torch.equal(seen, other), f"differs from rank {rank}"


def test_without_a_hook() -> None:
    check(gradient(), 1e-6)


def test_allreduce() -> None:
    seen = gradient(DDPCommHookType.ALLREDUCE)
    torch.testing.assert_close(seen, gradient(), rtol=1e-5, atol=0)
    check(seen, 1e-6)


def test_fp16_compress() -> None:
    seen = gradient(DDPCommHookType.FP16_COMPRESS)
    torch.testing.assert_close(seen, gradient(), rtol=1e-5, atol=1e-4)
    check(seen, 2**-10)  # float16 has 11 bits


def quantized(hook_type: Any) -> None:
    seen = gradient(hook_type)
    # Two times 8 bits: on the way to the sum, and of the sum on the way back.
    check(seen, 2 * 2 / 255)
    if dist.get_world_size() == 2:
        torch.testing.assert_close(seen, gradient(), rtol=1e-5, atol=1e-4)
    assert not torch.equal(seen, right_gradient()), "nothing was quantized"


@weft_only("can't quantize on the CPU")
@run_on(threads=(2, 4))
@run_on(gloo_threads=(2, 4), full=True)
@run_on(weft=(2, 4), gloo=(2, 4), full=True)
def test_quantize_per_tensor() -> None:
    quantized(DDPCommHookType.QUANTIZE_PER_TENSOR)


@weft_only("can't quantize on the CPU")
@run_on(threads=2, gloo_threads=2)
@run_on(threads=4, gloo_threads=4, full=True)
@run_on(weft=(2, 4), gloo=(2, 4), full=True)
def test_quantize_per_channel() -> None:
    quantized(DDPCommHookType.QUANTIZE_PER_CHANNEL)


def test_noop() -> None:
    seen = gradient(DDPCommHookType.NOOP)
    torch.testing.assert_close(seen, local_gradient(dist.get_rank()), rtol=0, atol=0)
    seen.div_(dist.get_world_size())
    dist.all_reduce(seen)
    torch.testing.assert_close(seen, gradient(), rtol=1e-5, atol=0)
    check(seen, 1e-6)


def test_is_last() -> None:
    """Only the last bucket says so. The hook reduces nothing, so gradients stay this rank's own."""

    def hook(flags, bucket):
        flags.append(bucket.is_last())
        future: Future[torch.Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    flags: list[bool] = []
    layers = [nn.Linear(2, 200, bias=False), *[nn.Linear(200, 200, bias=False) for _ in range(10)]]
    generator = torch.Generator().manual_seed(3)
    for layer in layers:
        nn.init.uniform_(layer.weight, -0.1, 0.1, generator=generator)
    inputs = rows_of(torch.randn(10 * dist.get_world_size(), 2, generator=generator), dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
    model.register_comm_hook(state=flags, hook=hook)
    for step in range(2):  # buckets are made anew after the first step; before that there may be one
        flags.clear()
        model.zero_grad()
        model(inputs).sum().backward()
        assert flags[-1]
        assert not any(flags[:-1])
        assert step == 0 or len(flags) > 2

    seen = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    bare = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in layers])
    for twin, layer in zip(bare, layers, strict=True):
        twin.weight = nn.Parameter(layer.weight.detach().clone())
    bare(inputs).sum().backward()
    for twin, grad in zip(bare, seen, strict=True):
        torch.testing.assert_close(grad, twin.weight.grad, rtol=0, atol=0)
