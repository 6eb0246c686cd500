"""Gradient hooks on sharded modules, on ranks that share a GPU: each part is its mean, step after step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp_bodies import comm_hooks as bodies
from tests.fsdp_bodies.twins import part_of
from tests.hook_bodies.made import assert_within
from weft import fully_shard
from weft.comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from weft.comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from weft.testing import on_ranks
from weft.testing.models import fill_parameters


def single(every: torch.Tensor) -> torch.Tensor:
    """Roundings of float32, some of them of products of a thousand numbers."""
    return every.abs().amax().expand(every.shape[1:]) * 2.0**-16


CASES = [
    (allreduce_hook, single),
    (fp16_compress_hook, lambda every: bodies.half(every) + single(every)),
    (bf16_compress_hook, lambda every: bodies.brief(every) + single(every)),
    (quantization_pertensor_hook, lambda every: bodies.byte(every) + single(every)),
    (quantization_perchannel_hook, lambda every: bodies.byte(every) + single(every)),
]


@pytest.mark.parametrize(("hook", "bound"), CASES, ids=lambda case: getattr(case, "__name__", ""))
@on_ranks(2, kind="process", backend="weft", timeout=120)
def test_means(hook: Any, bound: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(1000, 801), nn.Tanh(), nn.Linear(801, 9)).cuda()
    fill_parameters(model, seed=1)
    bare = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for step in range(3):
        rows = torch.randn(size, 16, 1000, generator=torch.Generator().manual_seed(step)).cuda()
        found: list[list[torch.Tensor]] = [[] for _ in bare.parameters()]
        for other in range(size):
            bare.zero_grad()
            bare(rows[other]).square().mean().backward()
            for grads, param in zip(found, bare.parameters(), strict=True):
                grads.append(param.grad.double().clone())
        torch.cuda._sleep(20_000_000)  # the GPU is behind: whoever reads too early finds the last step's
        model(rows[rank]).square().mean().backward()
        for grads, param in zip(found, model.parameters(), strict=True):
            every = torch.stack(grads)
            parts = [part_of(full, param.grad) for full in (every.mean(0), bound(every))]
            assert_within(param.grad.to_local(), *parts)
        model.zero_grad()
