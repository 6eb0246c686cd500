"""Compiled modules on a GPU that ranks share, against the same without a compiler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.compiler.pairs import LONG, MAY_WARN
from tests.ranks import run_on
from weft.comm_hooks import default_hooks
from weft.compiler import settings

pytestmark = MAY_WARN


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()


def batch_of(step: int) -> torch.Tensor:
    torch.manual_seed(10 * dist.get_rank() + step)
    return torch.randn(4, 16).cuda()


def check_steps(module: Any, plain: Any, compiled: Any) -> None:
    """Three steps, with gradients cleared before each."""
    for step in range(3):
        batch = batch_of(step)
        for one in (module, plain):
            one.zero_grad()
        compiled(batch).square().mean().backward()
        plain(batch).square().mean().backward()
        for (name, param), other in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@run_on(gpu=2, is_narrow=[False, True], **LONG)
@run_on(nccl=2, is_narrow=[False], timeout=200, collective_timeout=200)
@pytest.mark.parametrize("form", [None, "concat", "coalesced"])
def test_replicated(form: str | None, is_narrow: bool) -> None:
    torch.cuda.set_device(0)
    settings.form = form
    try:
        module, plain = (weft.replicate(copy.deepcopy(make_model())) for _ in range(2))
        if is_narrow:
            for one in (module, plain):
                one.register_comm_hook(None, default_hooks.bf16_compress_hook)  # type: ignore[operator]
        check_steps(module, plain, torch.compile(module, fullgraph=True))
    finally:
        settings.form = None
        torch.compiler.reset()


@run_on(gpu=2, **LONG)
@run_on(nccl=(2, 4), timeout=200)
def test_sharded() -> None:
    torch.cuda.set_device(0)
    module, plain = (weft.fully_shard(make_model()) for _ in range(2))
    check_steps(module, plain, torch.compile(module, fullgraph=True))
    torch.compiler.reset()
