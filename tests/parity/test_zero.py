"""A sharded optimizer leaves the same parameters as the plain one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft import DistributedDataParallel
from weft.comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from weft.comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from weft.optimizers import ZeroRedundancyOptimizer
from weft.testing import on_ranks
from weft.testing.models import MLP, make_batches

OPTIMIZERS = [
    pytest.param(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, id="sgd"),
    pytest.param(torch.optim.Adam, {"lr": 0.01}, id="adam"),
    pytest.param(torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}, id="adamw"),
    pytest.param(torch.optim.RMSprop, {"lr": 0.01, "centered": True}, id="rmsprop"),
    pytest.param(torch.optim.Adagrad, {"lr": 0.05}, id="adagrad"),
]
BATCHES = list(make_batches(MLP(), 5))


def train(model: nn.Module, make: Callable[[Iterable[nn.Parameter]], Any]) -> list[torch.Tensor]:
    """Train on this rank's share of the batches; every parameter after every step."""
    optimizer = make(model.parameters())
    seen: list[torch.Tensor] = []
    for batch in BATCHES:
        optimizer.zero_grad()
        shard = batch.shard()
        model(shard.inputs).pow(2).mean().backward()
        optimizer.step()
        seen.extend(param.detach().clone() for param in model.parameters())
    return seen


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@on_ranks(4)
def test_steps(optimizer: Any, options: dict[str, Any], as_view: bool) -> None:
    expected = train(DistributedDataParallel(MLP()), lambda params: optimizer(params, **options))
    found = train(
        DistributedDataParallel(MLP()),
        lambda params: ZeroRedundancyOptimizer(
            params, optimizer, parameters_as_bucket_view=as_view, **options
        ),
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("inner", [allreduce_hook, fp16_compress_hook])
@pytest.mark.parametrize("wrap", [hook_with_zero_step, hook_with_zero_step_interleaved])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS[:2])
@on_ranks(2)
def test_steps_inside_backward(
    wrap: Any, inner: Any, optimizer: Any, options: dict[str, Any], shard_buckets: bool
) -> None:
    plain = DistributedDataParallel(MLP(), bucket_cap_mb=0.0001)
    plain.register_comm_hook(None, inner)
    expected = train(plain, lambda params: optimizer(params, **options))
    model = DistributedDataParallel(MLP(), bucket_cap_mb=0.0001)

    def make(params: Iterable[nn.Parameter]) -> ZeroRedundancyOptimizer:
        zero = ZeroRedundancyOptimizer(params, optimizer, overlap_with_ddp=True, **options)
        model.register_comm_hook(None, wrap(inner, model, zero, shard_buckets=shard_buckets))
        return zero

    assert_equal(train(model, make), expected)
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("wrap", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_steps_inside_backward_of_processes(wrap: Any, backend: str) -> None:
    @on_ranks(2, kind="process", backend=backend)
    def body() -> None:
        test_steps_inside_backward.__wrapped__(wrap, allreduce_hook, torch.optim.Adam, {"lr": 0.01}, True)  # type: ignore[attr-defined]

    body()
