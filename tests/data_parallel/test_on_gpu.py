"""Data parallel on CUDA: ranks that share a GPU, on the local group and on nccl.

On one rank of nccl a hook makes the reducer work: without one a group of a single rank has nothing to do. Two
and four take each other for other hosts and talk over sockets: slow, but communicators, streams and the order
of collectives are real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradient,
    assert_same_gradients,
    filled,
    make_rows,
    net,
    rows_of,
    single_loss,
)
from tests.data_parallel.twins_on_gpu import BUSY_CYCLES, make_twin, rows_on_gpu
from tests.ranks import run_on
from weft.comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from weft.data_parallel import MixedPrecision

pytestmark = [
    run_on(gpu=2, nccl=1, timeout=60, collective_timeout=20),
    run_on(nccl=(2, 4)),
    pytest.mark.filterwarnings("default"),  # torch has some for GPUs, other ones with each release
]


def train(twin: Twin, steps: int = 3) -> None:
    for step in range(steps):
        twin.step(rows_on_gpu(step))


# -- the same gradients as a single process ----------------------------------------


def test_buckets_and_views() -> None:
    for cap in (0.0001, 25):
        for view in (False, True):
            train(make_twin(net(), bucket_cap_mb=cap, gradient_as_bucket_view=view))
    train(make_twin(net(), static_graph=True))
    train(make_twin(net(), find_unused_parameters=True, bucket_cap_mb=0.0001))


def test_replicate() -> None:
    twin = Twin(net().cuda(), wrap=weft.replicate, device_id=0, bucket_cap_mb=0.0001)
    for step in range(3):
        single_loss(twin.single, rows_on_gpu(step)).backward()
        mine = rows_of(make_rows(step), dist.get_rank())  # on the CPU
        twin.parallel(mine).square().mean().backward()
        twin.check()
        twin.update()


def test_device_ids() -> None:
    ddp = weft.DistributedDataParallel(net().cuda(), device_ids=[0])
    out = ddp(rows_of(make_rows(), dist.get_rank()))
    assert out.device == torch.device("cuda", 0)
    assert (ddp.device_ids, ddp.output_device) == ([0], 0)
    out.square().mean().backward()
    single = net().cuda()
    single_loss(single, rows_on_gpu()).backward()
    assert_same_gradients(ddp, single)


def test_unused_parameters() -> None:
    for find in (False, True):
        twin = make_twin(Branches("abc"), bucket_cap_mb=0.0001, find_unused_parameters=find)
        for step, names in enumerate([("ab", "c"), ("a",), ("c", "b"), ("abc",)]):
            twin.step(rows_on_gpu(step), loss_by_rank(*names))


def test_channels_last() -> None:
    model = filled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten()))
    twin = make_twin(model.to(memory_format=torch.channels_last))
    for step in range(2):
        images = rows_on_gpu(step, width=3 * 8 * 8).view(-1, 3, 8, 8)
        twin.backward(images.contiguous(memory_format=torch.channels_last))
        twin.check(1e-12)
        for param in twin.parallel.parameters():
            assert param.grad.stride() == param.stride()
        twin.update()


class Words(nn.Module):
    """A sparse table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 3)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.table((rows.abs() * 4).long().clamp(max=8)).sum(1)))


def test_sparse_gradients() -> None:
    twin = make_twin(Words())
    train(twin)
    twin.backward(rows_on_gpu())
    assert twin.parallel.module.table.weight.grad.is_sparse


def test_sparse_sums() -> None:
    """A group without a sparse all-reduce of its own gathers the entries."""
    rank = dist.get_rank()
    for num_entries in (0, 1, 3 + rank):
        at = torch.arange(num_entries, device="cuda").unsqueeze(0) * 2 + rank
        values = torch.full((num_entries, 2), 1.0 + rank, device="cuda", dtype=torch.float64)
        mine = torch.sparse_coo_tensor(at, values, (20, 2)).coalesce()
        right = sum(one.to_dense() for one in all_ranks(mine.cpu()))
        total = weft.comm.all_reduce(mine).wait()
        assert total.is_sparse
        assert torch.equal(total.to_dense().cpu(), right)


def test_accumulation() -> None:
    for view in (False, True):
        twin = make_twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
        for step in range(2):
            with twin.parallel.no_sync():
                twin.backward(rows_on_gpu(10 * step))
            twin.backward(rows_on_gpu(10 * step + 1))
            twin.check()
            twin.update()


def test_zero_grad() -> None:
    for view in (False, True):
        for to_none in (False, True):
            twin = make_twin(net(), gradient_as_bucket_view=view)
            for step in range(4):
                twin.backward(rows_on_gpu(step))
                twin.check()
                for model in (twin.parallel, twin.single):
                    model.zero_grad(set_to_none=to_none)


def test_kept_gradients() -> None:
    twin = make_twin(net())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        twin.backward(rows_on_gpu(step))
        kept += [(param.grad, param.grad.clone()) for param in twin.parallel.parameters()]
        twin.check()
        twin.update()
    for grad, values in kept:
        assert torch.equal(grad, values)


def test_user_hooks() -> None:
    """A post-accumulate hook sees the mean, on a stream that is ordered behind it."""
    twin = make_twin(net(), bucket_cap_mb=0.0001)
    seen: dict[int, torch.Tensor] = {}
    for param in twin.parallel.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.__setitem__(id(p), p.grad * 2))
    for step in range(3):
        seen.clear()
        twin.backward(rows_on_gpu(step))
        twin.check()
        for param in twin.parallel.parameters():
            assert torch.equal(seen[id(param)], param.grad * 2)
        twin.update()


def test_uneven_inputs() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    twin = Twin(net().cuda(), bucket_cap_mb=0.0001)
    with twin.parallel.join():
        for step in range(2 + rank):
            rows = rows_on_gpu(step)
            active = [other for other in range(size) if step < 2 + other]
            losses = [twin.single(rows_of(rows, other)).square().mean() for other in active]
            (torch.stack(losses).sum() / size).backward()
            twin.parallel(rows_of(rows, rank)).square().mean().backward()
            twin.check()
            twin.update()
    weights = all_ranks(twin.parallel.module[0].weight.cpu())
    assert all(torch.equal(weight, weights[0]) for weight in weights)


# -- precision and hooks -----------------------------------------------------------


def float_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    return filled(model, dtype=torch.float32).cuda()


def float_rows(seed: int) -> torch.Tensor:
    return rows_on_gpu(seed, width=64).float()


def test_grad_scaler() -> None:
    twin = make_twin(float_net())
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.SGD(twin.parallel.parameters(), lr=0.1)

    def loss_of(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return model(rows).float().square().mean()

    for step in range(3):
        rows = float_rows(step)
        single_loss(twin.single, rows, loss_of).backward()
        scaler.scale(loss_of(twin.parallel, rows_of(rows, dist.get_rank()), 0)).backward()
        scaler.unscale_(optimizer)
        twin.check(4e-3)
        scaler.step(optimizer)
        scaler.update()
        torch.optim.SGD(twin.single.parameters(), lr=0.1).step()
        for model in (twin.parallel, twin.single):
            model.zero_grad()
    before = [param.clone() for param in twin.parallel.parameters()]
    bad = float_rows(9) * (float("inf") if dist.get_rank() == 0 else 1.0)
    scaler.scale(loss_of(twin.parallel, bad, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(map(torch.equal, before, twin.parallel.parameters()))


def test_mixed_precision() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    twin = make_twin(float_net(), mixed_precision=policy) if dist.get_world_size() == 1 else None
    twin = twin or Twin(float_net(), mixed_precision=policy)
    optimizer = torch.optim.SGD(twin.parallel.parameters(), lr=0.1)
    for step in range(3):
        rows = float_rows(step)
        low = copy.deepcopy(twin.parallel.module)
        single_loss(twin.single, rows).backward()
        out = twin.parallel(rows_of(rows, dist.get_rank()))
        assert out.dtype is torch.bfloat16
        out.float().square().mean().backward()
        assert all(param.grad.dtype is torch.float32 for param in twin.parallel.parameters())
        twin.check(0.05)
        optimizer.step()
        assert not torch.equal(low[0].weight, twin.parallel.module[0].weight)
        twin.single.load_state_dict(twin.parallel.module.state_dict())
        for model in (twin.parallel, twin.single):
            model.zero_grad()


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, 256, 2, min_compression_rate=0.0, use_error_feedback=False)


HOOKS: dict[str, tuple[Callable[[], Any], Any, float]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook, 1e-5),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook, 1e-2),
    "int8 per tensor": (lambda: None, quantization_hooks.quantization_pertensor_hook, 1 / 127),
    "int8 per channel": (lambda: None, quantization_hooks.quantization_perchannel_hook, 1 / 127),
    "power sgd": (power_sgd, powerSGD_hook.powerSGD_hook, 1e-3),
}


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.grad.view(-1) for param in model.parameters()])


def test_hooks() -> None:
    for name, (make_state, hook, tolerance) in HOOKS.items():
        twin = Twin(float_net(), bucket_cap_mb=0.1)
        twin.parallel.register_comm_hook(make_state(), hook)
        for step in range(4):
            torch.cuda._sleep(BUSY_CYCLES)
            twin.backward(float_rows(step))
            seen, right = flat_gradients(twin.parallel), flat_gradients(twin.single)
            # Numbers that share a scale lose by the largest of them, so that is what counts.
            assert_same_gradient(seen, right, f"{name}, step {step}", tolerance)
            for other in all_ranks(seen.cpu()):
                assert torch.equal(seen.cpu(), other), f"{name}: ranks differ"
            twin.update()
            twin.single.load_state_dict(twin.parallel.module.state_dict())
