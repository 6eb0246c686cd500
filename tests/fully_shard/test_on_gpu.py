"""fully_shard on a GPU: the same training as a single process, whatever is sharded, offloaded or copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

from tests.fully_shard.models import (
    WIDTH,
    Experts,
    Language,
    Recurrent,
    as_whole,
    by_layer,
    filled,
    loss_by_rank,
    make_tokens,
    net,
    next_token_loss,
)
from tests.fully_shard.twins import (
    Twin,
    all_ranks,
    assert_is_shard,
    assert_is_sharded,
    descend,
    local_of,
    make_rows,
    mean_square,
    part_of,
    rows_of,
    rows_on_gpu,
    single_loss,
    twin_on_gpu,
)
from tests.ranks import run_on
from weft import CPUOffloadPolicy, MixedPrecisionPolicy
from weft.comm_hooks.default_hooks import bf16_compress_hook
from weft.fsdp import full_state_dict, load_full_state_dict

LIMITS: dict[str, Any] = {"timeout": 60, "collective_timeout": 20}

ON_NCCL = run_on(nccl=2, also=True)
ON_NCCL_OF_FOUR = run_on(nccl=(2, 4), also=True)

pytestmark = run_on(gpu=2, nccl=1, **LIMITS)

BF16 = torch.bfloat16
Reshard = bool | int | None


def by_blocks(model: Any, **options: Any) -> None:
    for block in model.blocks:
        as_whole(block, **options)
    as_whole(model, **options)


# -- training ---------------------------------------------------------------------------


@run_on(gpu=2, nccl=1, reshard=[None, True, False], **LIMITS)
@run_on(gpu_gloo=2, gpu_threads=2, reshard=[True], **LIMITS)
@run_on(gpu=4, reshard=[2, True], **LIMITS)
@run_on(nccl=2, reshard=[None, True, False])
@run_on(nccl=4, reshard=[2, True])
def test_ten_steps_of_adam(reshard: Reshard) -> None:
    """Tied weights and uneven shards; losses, parameters and Adam's state."""
    model: nn.Module = Language().cuda()
    single = copy.deepcopy(model)
    by_blocks(model, reshard_after_forward=reshard)
    assert_is_sharded(model, single)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, single)]
    losses, right_losses = [], []
    for step in range(10):
        tokens = make_tokens(step % 7).cuda()
        loss = next_token_loss(model, rows_of(tokens, dist.get_rank()))
        right = single_loss(single, tokens, next_token_loss)
        for each, kept in ((loss, losses), (right, right_losses)):
            each.backward()
            kept.append(each.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    means = [sum(of_a_step) / len(of_a_step) for of_a_step in zip(*all_ranks(losses), strict=True)]
    assert means == pytest.approx(right_losses, rel=1e-9)
    for (name, param), other in zip(model.named_parameters(), single.parameters(), strict=True):
        assert param.is_cuda
        assert_is_shard(param, other, name, 1e-8)
        seen, wanted = optimizers[0].state[param], optimizers[1].state[other]
        assert_is_shard(seen["exp_avg_sq"], wanted["exp_avg_sq"], f"Adam's state of {name}", 1e-8)


@run_on(gpu_gloo=2, gpu_threads=2, also=True, **LIMITS)
def test_plain_steps() -> None:
    for reshard in (None, True, False):
        for wrap in (by_layer, as_whole):
            twin = twin_on_gpu(net(), wrap, reshard_after_forward=reshard)
            for step in range(3):
                twin.step(rows_on_gpu(step))


@run_on(gpu_gloo=2, gpu_threads=2, gpu=4, also=True, **LIMITS)
@ON_NCCL_OF_FOUR
def test_mixed_precision() -> None:
    """Computed in bfloat16 on each rank, averaged in float32."""
    model = net(width=32).float().cuda()
    right = copy.deepcopy(model)
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = make_rows(1, width=32).cuda().float()
    loss = mean_square(model, rows_of(rows, rank), rank)
    loss.backward()
    assert loss.dtype == BF16
    totals = [torch.zeros_like(param) for param in right.parameters()]
    for other in range(size):
        narrow = copy.deepcopy(right).to(BF16)
        mean_square(narrow, rows_of(rows, other).to(BF16), other).backward()
        for total, param in zip(totals, narrow.parameters(), strict=True):
            total += param.grad.float() / size
    for (name, param), wanted in zip(model.named_parameters(), totals, strict=True):
        assert param.dtype == param.grad.dtype == torch.float32
        assert_is_shard(param.grad, wanted, name, 2.0**-6)  # layouts in memory choose the GPU's kernels
    if size > 1:
        locals_ = [local_of(param.grad) for param in model.parameters()]
        assert any(not torch.equal(local, local.to(BF16).float()) for local in locals_)


@ON_NCCL
def test_accumulation() -> None:
    for reshard in (True, False):
        twin = twin_on_gpu(net(), reshard_after_forward=reshard)
        for step in range(2):
            accumulate(twin, step)
            twin.update()


def accumulate(twin: Twin, step: int) -> None:
    """Without sync, with sync, and with sync once more."""
    device = next(twin.single.parameters()).device
    twin.sharded.set_requires_gradient_sync(False)
    twin.backward(make_rows(10 * step).to(device))
    twin.sharded.set_requires_gradient_sync(True)
    for more in (1, 2):
        twin.backward(make_rows(10 * step + more).to(device))
        twin.check()


@run_on(gpu_threads=2, gpu=4, also=True, **LIMITS)
@ON_NCCL_OF_FOUR
def test_other_experts() -> None:
    """Ranks use different modules; a parameter that no rank has used gets no gradient."""
    for reshard in (True, False):
        twin = twin_on_gpu(Experts("abc"), reshard_after_forward=reshard)
        for step, names in enumerate([("a", "b"), ("abc", ""), ("b", "ca"), ("c",), ("abc",), ("", "a")]):
            twin.step(rows_on_gpu(step), loss_by_rank(*names))


def test_recurrent() -> None:
    """cuDNN wants an LSTM's weights side by side: in its first forward the module moves them."""
    for reshard in (True, False):
        twin = twin_on_gpu(Recurrent(), reshard_after_forward=reshard)
        for step in range(4):
            twin.step(rows_on_gpu(step))


def test_normed_weights() -> None:
    """Weights that are computed from parameters as they are read."""
    layers = [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    twin = twin_on_gpu(filled(nn.Sequential(layers[0], nn.Tanh(), layers[1])))
    for step in range(3):
        twin.step(rows_on_gpu(step))


@run_on(gpu=4, **LIMITS)
@run_on(nccl=4)
def test_hybrid() -> None:
    """On four ranks: shards over two, two copies."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    for reshard in (True, False):
        twin = twin_on_gpu(net(), mesh=mesh, reshard_after_forward=reshard)
        for step in range(3):
            twin.step(rows_on_gpu(step))
        twin.sharded.set_requires_all_reduce(False)
        twin.backward(rows_on_gpu(5))
        twin.sharded.set_requires_all_reduce(True)
        twin.backward(rows_on_gpu(6))
        twin.check()


# -- shards on the CPU ------------------------------------------------------------------


def offloaded_twin(pin_memory: bool, **options: Any) -> Twin:
    """The single process stays on the CPU; the sharded model computes on the GPU."""

    def wrap(model: nn.Module, **more: Any) -> None:
        by_layer(model.cuda(), **more)

    return Twin(net(), wrap, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory), **options)


@run_on(gpu=2, nccl=1, pin_memory=[True, False], **LIMITS)
@run_on(gpu=4, gpu_threads=2, pin_memory=[True], **LIMITS)
@run_on(nccl=2, pin_memory=[True])
def test_offloaded(pin_memory: bool) -> None:
    for reshard in (True, False):
        twin = offloaded_twin(pin_memory, reshard_after_forward=reshard)
        for step in range(3):
            twin.backward(make_rows(step))
            twin.check()
            for param in twin.sharded.parameters():
                assert local_of(param).is_cpu
                assert local_of(param.grad).is_cpu
                if local_of(param).numel():
                    assert local_of(param).is_pinned() == pin_memory
            twin.update()
            twin.assert_same_parameters()


@run_on(gpu=2, nccl=1, pin_memory=[True, False], **LIMITS)
@run_on(nccl=2, pin_memory=[True])
def test_offloaded_accumulation(pin_memory: bool) -> None:
    twin = offloaded_twin(pin_memory)
    for step in range(2):
        accumulate(twin, step)
        twin.update()


@run_on(gpu=2, nccl=1, pin_memory=[True, False], **LIMITS)
def test_offloaded_updates_in_backward(pin_memory: bool) -> None:
    """A hook after accumulation finds the gradient there, in the CPU's memory, and may use it up."""
    twin = offloaded_twin(pin_memory)
    num_calls: dict[str, int] = {}
    for name, param in twin.sharded.named_parameters():

        def update(param: torch.Tensor, name: str = name) -> None:
            num_calls[name] = num_calls.get(name, 0) + 1
            descend(param, 0.1)

        param.register_post_accumulate_grad_hook(update)
    for step in range(3):
        twin.backward(make_rows(step))
        assert all(param.grad is None for param in twin.sharded.parameters())
        for param in twin.single.parameters():
            descend(param, 0.1)
        twin.assert_same_parameters()
    assert num_calls == {name: 3 for name, _ in twin.single.named_parameters()}


def test_offloaded_adam() -> None:
    """In bfloat16 too: the optimizer steps in float32, on the CPU."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model = net(width=32).float()
    by_layer(model.cuda(), offload_policy=CPUOffloadPolicy(), mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = rows_of(make_rows(1, width=32), dist.get_rank()).float()
    losses: list[float] = []
    for _ in range(10):
        loss = model(rows).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all(local_of(param).is_cpu for param in model.parameters())


# -- hooks, copies, state -----------------------------------------------------------------


@ON_NCCL_OF_FOUR
def test_bf16_hook() -> None:
    twin = twin_on_gpu(net())
    twin.sharded.register_comm_hook(None, bf16_compress_hook)
    for step in range(3):
        twin.backward(rows_on_gpu(step))
        twin.check(2.0**-6)
        for param in twin.sharded.parameters():
            is_narrow = torch.equal(local_of(param.grad), local_of(param.grad).to(BF16).double())
            assert is_narrow or dist.get_world_size() == 1  # where nothing has to be sent
        for each in (twin.sharded, twin.single):
            each.zero_grad()


@run_on(gpu_threads=2, also=True, **LIMITS)
def test_deep_copies() -> None:
    """Independent of the model, on the GPU like it."""
    twin = twin_on_gpu(net())
    twin.step(rows_on_gpu(0))
    copied = Twin.__new__(Twin)
    copied.sharded, copied.single = copy.deepcopy(twin.sharded), copy.deepcopy(twin.single)
    twin.step(rows_on_gpu(1))
    for step in range(2, 4):
        copied.step(rows_on_gpu(step))
        twin.step(rows_on_gpu(step))
    assert all(param.is_cuda for param in copied.sharded.parameters())


@run_on(gpu=2, nccl=1, is_offloaded=[False, True], **LIMITS)
@run_on(nccl=2, is_offloaded=[True])
def test_states(is_offloaded: bool) -> None:
    """Sharded, full on rank 0's CPU, and full back into another model."""
    options = {"offload_policy": CPUOffloadPolicy()} if is_offloaded else {}
    model = Language().cuda()
    single = copy.deepcopy(model)
    by_blocks(model, **options)
    next_token_loss(model, make_tokens(1).cuda()).backward()
    kind = "cpu" if is_offloaded else "cuda"
    right = single.state_dict()
    assert list(model.state_dict()) == list(right)
    for name, value in model.state_dict().items():
        assert value.to_local().device.type == kind
        assert torch.equal(local_of(value).cuda(), part_of(right[name], value))
    full = full_state_dict(model)
    assert list(full) == (list(right) if dist.get_rank() == 0 else [])
    for name, value in full.items():
        assert value.is_cpu
        assert torch.equal(value, right[name].cpu())
    other = Language().cuda()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    by_blocks(other, **options)
    load_full_state_dict(other, full if dist.get_rank() == 0 else None)
    for name, value in other.state_dict().items():
        assert torch.equal(local_of(value).cuda(), part_of(right[name], value))


@ON_NCCL
def test_scaled_losses() -> None:
    """An overflow on one rank is seen by all of them: no rank updates, and all scale less."""
    model = net().float().cuda()
    by_layer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for overflows in (False, True, False):
        before = [local_of(param).clone() for param in model.parameters()]
        rows = rows_of(rows_on_gpu(1), dist.get_rank()).float()
        loss = model(rows).square().mean()
        if overflows and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(a, local_of(p)) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) == overflows
    assert scaler.get_scale() == 2.0
