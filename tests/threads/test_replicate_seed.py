"""The contract's tests of replicate, run eagerly: accumulation, checkpoints and hooks, beside DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel_bodies.libraries import ON_TORCH, DistributedDataParallel, replicate
from tests.data_parallel_bodies.twins import assert_same_gradients, filled, gradients_of, make_rows, rows_of
from weft.testing import on_ranks

if ON_TORCH:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
else:
    from weft.comm_hooks import default_hooks

DIM = 24
ROUNDINGS = {
    "": 1e-6,
    "fp16_compress_hook": 2**-9,
    "bf16_compress_hook": 2**-6,
}  # of the tensor's largest value
HOOKS = [name for name in ROUNDINGS if not (ON_TORCH and name.startswith("bf16"))]  # torch: on a GPU only


class Net(nn.Module):
    """Four layers, the first of them behind a checkpoint if asked for."""

    def __init__(self, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(DIM, DIM) for _ in range(4))
        self.use_checkpoint = use_checkpoint
        filled(self, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(first)))


def train_beside_a_single_process(use_checkpoint: bool, no_sync: bool, hook: str) -> None:
    single = Net(use_checkpoint)
    replica = replicate(copy.deepcopy(single), bucket_cap_mb=0.002)
    ddp = DistributedDataParallel(copy.deepcopy(single), bucket_cap_mb=0.002)
    if hook:
        for model in (replica, ddp):
            model.register_comm_hook(None, getattr(default_hooks, hook))
    models: list[Any] = [single, replica, ddp]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(6):
        is_synced = not no_sync or step % 2 == 1
        rows = make_rows(step, width=DIM).float()
        mine = rows_of(rows, dist.get_rank())
        replica.set_requires_gradient_sync(is_synced)
        single(rows).square().mean().backward()
        replica(mine).square().mean().backward()
        with ddp.no_sync() if not is_synced else torch.enable_grad():
            ddp(mine).square().mean().backward()
        if is_synced:
            assert_same_gradients(replica, single, ROUNDINGS[hook])
            for name, grad in gradients_of(ddp).items():
                assert torch.equal(grad, gradients_of(replica)[name]), name
            # All go on from one point: what a hook rounds off is no error of the next step.
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            replica.load_state_dict(single.state_dict())
            ddp.module.load_state_dict(single.state_dict())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@on_ranks(2)
def test_replicate_and_ddp(use_checkpoint: bool, no_sync: bool, hook: str) -> None:
    train_beside_a_single_process(use_checkpoint, no_sync, hook)


@on_ranks(4)
def test_on_four_ranks() -> None:
    train_beside_a_single_process(use_checkpoint=True, no_sync=True, hook="")
