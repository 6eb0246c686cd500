"""Hooks of parameters and of reductions: when they run, what they are given, what they may change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tests.fully_shard.models import Experts, net
from tests.fully_shard.twins import Twin, assert_is_shard, make_rows
from tests.ranks import run_on
from weft import GradBucket
from weft.comm_hooks import chain
from weft.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook

pytestmark = run_on(threads=(2, 4), gpu=2, nccl=2)
# For bodies that compare with tensors of the CPU themselves.
ON_CPU = run_on(threads=(2, 4))

Seen = dict[str, list[torch.Tensor]]


def linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def watch_gradients(model: nn.Module) -> Seen:
    """What each parameter's own hook is given."""
    seen: Seen = defaultdict(list)
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen[name].append(grad.clone()))
    return seen


def test_parameter_hooks_see_the_shard() -> None:
    """The reduced gradient of this backward alone, though `.grad` adds up."""
    twin = Twin(net())
    seen = watch_gradients(twin.sharded)
    right: Seen = {name: [] for name, _ in twin.single.named_parameters()}
    for name, param in twin.single.named_parameters():
        param.register_hook(lambda grad, name=name: right[name].append(grad.clone()))
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check()
        assert {name: len(grads) for name, grads in seen.items()} == dict.fromkeys(right, step + 1)
        for name, grads in seen.items():
            # The single process's hook may be called once for all ranks' rows, or once for each rank's.
            assert_is_shard(grads[-1], sum(right[name]), name)
            right[name].clear()


def test_parameter_hooks_may_change_the_gradient() -> None:
    twin = Twin(net())
    handles = [param.register_hook(lambda grad: grad * 2) for param in twin.sharded.parameters()]
    for factor in (2.0, 1.0):
        twin.backward(make_rows())
        for param in twin.single.parameters():
            param.grad.mul_(factor)
        twin.check()
        twin.update()
        for handle in handles:
            handle.remove()


def test_hooks_follow_reductions() -> None:
    """Once for each reduction, not for each backward; the parameter's hook comes first."""
    twin = Twin(net())
    order: dict[str, list[str]] = defaultdict(list)
    for name, param in twin.sharded.named_parameters():
        param.register_hook(lambda grad, name=name: order[name].append("hook"))

        def after(param: torch.Tensor, name: str = name) -> None:
            assert isinstance(param, DTensor)
            assert isinstance(param.grad, DTensor)
            assert param.grad.to_local().shape == param.to_local().shape
            order[name].append("after")

        param.register_post_accumulate_grad_hook(after)
    twin.sharded.set_requires_gradient_sync(False)
    twin.backward(make_rows(0))
    assert not order
    twin.sharded.set_requires_gradient_sync(True)
    twin.backward(make_rows(1))
    twin.check()
    assert order == {name: ["hook", "after"] for name, _ in twin.sharded.named_parameters()}
    twin.backward(make_rows(2))
    assert all(calls == ["hook", "after"] * 2 for calls in order.values())


def test_hooks_see_the_whole_gradient_of_a_step() -> None:
    """After accumulation `.grad` is what the optimizer would use."""
    twin = Twin(net())
    found: dict[str, torch.Tensor] = {}
    for name, param in twin.sharded.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    for step in range(2):
        twin.backward(make_rows(step))
    for name, param in twin.single.named_parameters():
        assert_is_shard(found[name], param.grad, name)


def test_hooks_on_unused_parameters_stay_silent() -> None:
    """Used by one rank: called on all. Used by none: on none."""
    twin = Twin(Experts("abc"))
    seen = watch_gradients(twin.sharded)

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return model(rows, "a" if rank == 0 else "b").square().mean()

    twin.backward(make_rows(), loss)
    twin.check()
    assert {name.split(".")[1] for name in seen if "experts" in name} == {"a", "b"}


def a_reduction_hook(hook: Callable[..., Any], tolerance: float, is_exact: bool, state: Any = None) -> None:
    """The hook's mean is the mean, as precisely as the hook promises."""
    twin = Twin(net().float())
    twin.sharded.register_comm_hook(state, hook)
    for step in range(3):
        twin.backward(make_rows(step).float())
        twin.check(tolerance)
        if not is_exact:  # else nothing was compressed
            apart = [
                (param.grad.full_tensor() - right.grad).abs().max() / right.grad.abs().max()
                for param, right in zip(twin.sharded.parameters(), twin.single.parameters(), strict=True)
            ]
            assert max(apart) > 1e-5
        for model in (twin.sharded, twin.single):
            model.zero_grad()


@ON_CPU
def test_reduction_hooks() -> None:
    a_reduction_hook(allreduce_hook, 1e-5, True)
    a_reduction_hook(bf16_compress_hook, 2.0**-6, False)
    a_reduction_hook(fp16_compress_hook, 2.0**-9, False)
    a_reduction_hook(bf16_compress_wrapper(allreduce_hook), 2.0**-6, False)


@ON_CPU
def test_quantizing_hooks() -> None:
    """Eight bits: a 127th of the largest number of a block, on the way out and on the way back."""
    a_reduction_hook(quantization_pertensor_hook, 0.05, False)
    a_reduction_hook(quantization_perchannel_hook, 0.05, False)


def test_a_hook_of_the_user() -> None:
    """It gets each group's gradients in a bucket once a step; what its future brings is the gradient."""
    twin = Twin(net())
    sizes: list[int] = []

    def hook(state: list[str], bucket: GradBucket) -> Future[torch.Tensor]:
        state.append("called")
        sizes.append(bucket.buffer().numel())
        done: Future[torch.Tensor] = Future()
        done.set_result(torch.full_like(bucket.buffer(), 2.0))
        return done

    state: list[str] = []
    twin.sharded.register_comm_hook(state, hook)
    for step in range(2):
        twin.backward(make_rows(step))
        assert len(state) == 3 * (step + 1)
        for param in twin.sharded.parameters():
            assert (param.grad.to_local() == 2.0).all()
        twin.sharded.zero_grad()
    layer = sum(param.numel() for param in twin.single[0].parameters())
    assert min(sizes) >= layer // dist.get_world_size()


@ON_CPU
def test_hooks_in_a_chain() -> None:
    a_reduction_hook(chain(bf16_compress_wrapper(allreduce_hook)), 2.0**-6, False)


def test_hooks_of_the_reduced_shard() -> None:
    """set_all_reduce_hook: a flat tensor, this rank's part of the mean, to change in place."""
    twin = Twin(net())
    outputs: list[torch.Tensor] = []

    def triple(output: torch.Tensor) -> None:
        outputs.append(output)
        output.mul_(3)

    for layer in linears(twin.sharded)[:2]:
        layer.set_all_reduce_hook(triple)
    twin.backward(make_rows())
    assert len(outputs) == 2
    assert all(output.ndim == 1 for output in outputs)
    for layer in linears(twin.single)[:2]:
        for param in layer.parameters():
            param.grad.mul_(3)
    twin.check()


def test_divide_factors() -> None:
    """The sum over the ranks is divided by it, in this module's group only."""
    size = dist.get_world_size()
    for factor in (1.0, 3.0, float(size)):
        twin = Twin(net())
        linears(twin.sharded)[1].set_gradient_divide_factor(factor)
        for step in range(2):
            twin.backward(make_rows(step))
            for param in linears(twin.single)[1].parameters():
                param.grad.mul_(size / factor)
            twin.check()
            twin.update()
