"""Data parallel on CUDA: ranks that share one GPU on the local group, and one rank on nccl.

On nccl a hook makes the reducer work: without one a group of a single rank has nothing to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import weft
from tests.data_parallel_bodies.branching import Branches, loss_by_rank
from tests.data_parallel_bodies.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradients,
    filled,
    make_rows,
    net,
    rows_of,
    single_loss,
)
from weft.comm_hooks import GradBucket, default_hooks, powerSGD_hook, quantization_hooks
from weft.data_parallel import MixedPrecision
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUSY_CYCLES = 20_000_000  # some ten milliseconds: whoever doesn't wait for the GPU reads stale numbers


def reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a group of one rank would leave out: a call for each bucket."""
    return weft.comm.all_reduce(bucket.buffer()).future()


def make_twin(model: nn.Module, **options: Any) -> Twin:
    twin = Twin(model.cuda(), **options)
    if dist.get_world_size() == 1:
        twin.parallel.register_comm_hook(None, reduce_hook)
    return twin


def rows_on_gpu(seed: int = 1, **options: Any) -> torch.Tensor:
    return make_rows(seed, **options).cuda()


def train(twin: Twin, steps: int = 3) -> None:
    for step in range(steps):
        twin.step(rows_on_gpu(step))


# -- the same gradients as a single process ----------------------------------------


def check_buckets_and_views() -> None:
    for cap in (0.0001, 25):
        for view in (False, True):
            train(make_twin(net(), bucket_cap_mb=cap, gradient_as_bucket_view=view))
    train(make_twin(net(), static_graph=True))
    train(make_twin(net(), find_unused_parameters=True, bucket_cap_mb=0.0001))


def check_replicate() -> None:
    twin = Twin(net().cuda(), wrap=weft.replicate, device_id=0, bucket_cap_mb=0.0001)
    for step in range(3):
        single_loss(twin.single, rows_on_gpu(step)).backward()
        mine = rows_of(make_rows(step), dist.get_rank())  # on the CPU
        twin.parallel(mine).square().mean().backward()
        twin.check()
        twin.update()


def check_device_ids() -> None:
    ddp = weft.DistributedDataParallel(net().cuda(), device_ids=[0])
    out = ddp(rows_of(make_rows(), dist.get_rank()))
    assert out.device == torch.device("cuda", 0)
    assert (ddp.device_ids, ddp.output_device) == ([0], 0)
    out.square().mean().backward()
    single = net().cuda()
    single_loss(single, rows_on_gpu()).backward()
    assert_same_gradients(ddp, single)


def check_unused_parameters() -> None:
    for find in (False, True):
        twin = make_twin(Branches("abc"), bucket_cap_mb=0.0001, find_unused_parameters=find)
        for step, names in enumerate([("ab", "c"), ("a",), ("c", "b"), ("abc",)]):
            twin.step(rows_on_gpu(step), loss_by_rank(*names))


def check_channels_last() -> None:
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


def check_sparse_gradients() -> None:
    twin = make_twin(Words())
    train(twin)
    twin.backward(rows_on_gpu())
    assert twin.parallel.module.table.weight.grad.is_sparse


def check_sparse_sums() -> None:
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


def check_accumulation() -> None:
    for view in (False, True):
        twin = make_twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
        for step in range(2):
            with twin.parallel.no_sync():
                twin.backward(rows_on_gpu(10 * step))
            twin.backward(rows_on_gpu(10 * step + 1))
            twin.check()
            twin.update()


def check_zero_grad() -> None:
    for view in (False, True):
        for to_none in (False, True):
            twin = make_twin(net(), gradient_as_bucket_view=view)
            for step in range(4):
                twin.backward(rows_on_gpu(step))
                twin.check()
                for model in (twin.parallel, twin.single):
                    model.zero_grad(set_to_none=to_none)


def check_kept_gradients() -> None:
    twin = make_twin(net())
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        twin.backward(rows_on_gpu(step))
        kept += [(param.grad, param.grad.clone()) for param in twin.parallel.parameters()]
        twin.check()
        twin.update()
    for grad, values in kept:
        assert torch.equal(grad, values)


def check_user_hooks() -> None:
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


def check_uneven_inputs() -> None:
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


# -- streams -----------------------------------------------------------------------


class Busy(torch.autograd.Function):
    """Keeps the GPU busy before the gradient is made."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.cuda._sleep(BUSY_CYCLES)
        return grad.clone()


class Deep(nn.Module):
    """Large layers, with a GPU that is busy now and then in the parallel one's backward."""

    def __init__(self, depth: int = 12, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.tanh(layer(rows))
            if number % 3 == 0:
                rows = Busy.apply(rows)
        return rows


def check_overlap() -> None:
    for view in (False, True):
        twin = make_twin(Deep(), bucket_cap_mb=3, gradient_as_bucket_view=view)
        for step in range(4):
            torch.cuda._sleep(BUSY_CYCLES)
            twin.backward(rows_on_gpu(step, width=512))
            # Used at once, in the order of the stream; nobody waits for the GPU.
            twin.check(1e-12)
            twin.update()


def check_a_side_stream() -> None:
    """Forward and backward on another stream; then forward there and backward here."""
    twin = make_twin(Deep(6), bucket_cap_mb=3)
    side = torch.cuda.Stream()
    for step, is_backward_there in enumerate([True, False, True]):
        rows = rows_on_gpu(step, width=512)
        single_loss(twin.single, rows).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = twin.parallel(rows_of(rows, dist.get_rank())).square().mean()
            if is_backward_there:
                loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        if not is_backward_there:
            loss.backward()
        twin.check(1e-12)
        twin.update()


class Forked(nn.Module):
    """Two branches, each on a stream of its own: gradients of one bucket come on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(512, 512), nn.Linear(512, 512)
        self.streams: list[Any] = []
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        outs: list[torch.Tensor] = []
        for branch, stream in zip((self.left, self.right), self.streams or (here, here), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                outs.append(branch(Busy.apply(rows)) if branch is self.left else branch(rows))
                outs[-1] = Busy.apply(outs[-1]) if branch is self.right else outs[-1]
        for stream in self.streams:
            here.wait_stream(stream)
        return outs[0] + outs[1]


def check_two_streams_in_a_bucket() -> None:
    twin = make_twin(Forked())
    twin.parallel.module.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(5):
        rows = rows_on_gpu(step, width=512)
        single_loss(twin.single, rows).backward()
        twin.parallel(rows_of(rows, dist.get_rank())).square().mean().backward()
        twin.check(1e-12)
        twin.update()


# -- precision and hooks -----------------------------------------------------------


def float_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    return filled(model, dtype=torch.float32).cuda()


def float_rows(seed: int) -> torch.Tensor:
    return rows_on_gpu(seed, width=64).float()


def check_grad_scaler() -> None:
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


def check_mixed_precision() -> None:
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
    "int8 per tensor": (lambda: None, quantization_hooks.quantization_pertensor_hook, 1e-2),
    "int8 per channel": (lambda: None, quantization_hooks.quantization_perchannel_hook, 1e-2),
    "power sgd": (power_sgd, powerSGD_hook.powerSGD_hook, 1e-3),
}


def check_hooks() -> None:
    for name, (make_state, hook, tolerance) in HOOKS.items():
        twin = Twin(float_net(), bucket_cap_mb=0.1)
        twin.parallel.register_comm_hook(make_state(), hook)
        for step in range(4):
            torch.cuda._sleep(BUSY_CYCLES)
            twin.backward(float_rows(step))
            try:
                twin.check(tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}, step {step}: {error}") from error
            grads = [param.grad.cpu() for param in twin.parallel.parameters()]
            for other in all_ranks(grads):
                assert all(map(torch.equal, grads, other)), f"{name}: ranks differ"
            twin.update()
            twin.single.load_state_dict(twin.parallel.module.state_dict())


# -- memory ------------------------------------------------------------------------


def peak_bytes(module: nn.Module, rows: torch.Tensor) -> int:
    """The most that a step allocates, the model included."""
    for _ in range(3):
        module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        module(rows).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def check_memory() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, device="cuda") for _ in range(40)))

    rows = torch.randn(64, 1024, device="cuda")
    is_alone = dist.get_world_size() == 1
    group = None if is_alone else dist.new_group(backend="gloo")
    ours = weft.DistributedDataParallel(make())
    if is_alone:
        ours.register_comm_hook(None, reduce_hook)
    seen = peak_bytes(ours, rows)
    if not is_alone:  # the local group's buffers are not of torch's allocator
        seen += sum(bucket.num_bytes for bucket in ours._replica.reducer.buckets.plan)
    del ours
    theirs = TorchDDP(make(), process_group=group, gradient_as_bucket_view=True)
    limit = peak_bytes(theirs, rows)
    print(f"peak: weft {seen / 2**20:.1f} MB, torch {limit / 2**20:.1f} MB", flush=True)
    assert seen <= limit + 25 * 2**20 * 1.1


CHECKS = [value for name, value in globals().items() if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks_on_one_gpu(check: Callable[[], None]) -> None:
    shared_pool(2).run(check, backend="weft", timeout=60)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_one_rank_on_nccl(check: Callable[[], None]) -> None:
    shared_pool(1).run(check, backend="nccl", timeout=60)
