"""loss_parallel under torch.compile: around a compiled function, and inside of one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from weft.tensor_parallel.loss import loss_parallel
from weft.testing.pool import shared_pool

TARGET = torch.tensor([3, 0, -100, 4])


def loss_of(x: Any) -> Any:
    loss: Any = F.cross_entropy(x, TARGET, label_smoothing=0.1)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_in_two_steps(x: Any) -> Any:
    loss: Any = F.nll_loss(F.log_softmax(x, 1), TARGET)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_inside(x: Any) -> Any:
    with loss_parallel():
        return loss_of(x)


def run_compiled() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start, size = (0, 3) if dist.get_rank() == 0 else (3, 2)
    cases: list[tuple[Any, Any, bool]] = [
        (loss_inside, nullcontext, False),
        (loss_of, loss_parallel, True),
        (loss_in_two_steps, loss_parallel, False),
    ]
    for fn, context, is_dynamic in cases:
        torch._dynamo.reset()
        whole.grad = None
        expected = fn(whole)
        expected.backward()
        local = whole.detach()[:, start : start + size].clone().requires_grad_()
        split = DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride())
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=is_dynamic)
        with context():
            loss = compiled(split)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert whole.grad is not None
        torch.testing.assert_close(local.grad, whole.grad[:, start : start + size])


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_compiled(backend: str) -> None:
    shared_pool(2).run(run_compiled, backend=backend, timeout=120, collective_timeout=60)
