"""Join with weft's own joinables: DistributedDataParallel and ZeroRedundancyOptimizer.

Rank r makes 2 + r steps. With gradients divided by the number of active ranks, the model is
that of a single process that sees the mean of the active ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.join.models import WIDTH, SyncBatchNormOnCpu, batch, make_model
from tests.ranks import run_on
from weft import DistributedDataParallel, comm, fully_shard, record, replicate
from weft.comm_hooks import GradBucket
from weft.comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from weft.comm_hooks.default_hooks import allreduce_hook
from weft.comm_hooks.quantization_hooks import quantization_pertensor_hook
from weft.join import Join
from weft.optimizers import ZeroRedundancyOptimizer

pytestmark = [run_on(threads=(2, 4)), run_on(weft=4, gloo=4, full=True)]

OPTIONS: Any = {"lr": 0.05, "momentum": 0.9}
ROWS = 3


def rows(rank: int, step: int) -> Tensor:
    """As many on every rank, so that the mean of means is the mean."""
    return batch(rank, step).repeat(2, 1)[:ROWS]


def num_steps(rank: int) -> int:
    return 2 + rank


def plain_model() -> nn.Sequential:
    model = make_model(nn.BatchNorm1d)
    return nn.Sequential(model[0], nn.Tanh(), model[3])


def train_alone(model: nn.Module, scale: Callable[[int], float] = lambda num_active: 1.0) -> nn.Module:
    """What a single process makes of the active ranks' rows."""
    size = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for step in range(num_steps(size - 1)):
        optimizer.zero_grad()
        active = [rank for rank in range(size) if step < num_steps(rank)]
        loss = (model(torch.cat([rows(rank, step) for rank in active])) ** 2).mean()
        (loss * scale(len(active))).backward()
        optimizer.step()
    return model


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    for (name, tensor), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(
            tensor, other, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(model: DistributedDataParallel, optimizer: Any, extra: Any = None) -> None:
    joinables = [model, optimizer] if isinstance(optimizer, ZeroRedundancyOptimizer) else [model]
    with Join(joinables, divide_by_initial_world_size=False):
        for step in range(num_steps(dist.get_rank())):
            optimizer.zero_grad()
            loss = (model(rows(dist.get_rank(), step)) ** 2).mean()
            loss.backward()
            optimizer.step()
            if extra is not None:
                extra(step, loss.detach())
    dist.barrier()


def test_ddp() -> None:
    model = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
    train(model, torch.optim.SGD(model.parameters(), **OPTIONS))
    assert_same_model(model.module, train_alone(plain_model()))


def test_ddp_with_a_metric() -> None:
    model = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
    size = dist.get_world_size()

    def extra(step: int, loss: Tensor) -> None:
        counted = torch.tensor([1.0, float(dist.get_rank())])
        dist.all_reduce(counted)
        active = [rank for rank in range(size) if step < num_steps(rank)]
        assert counted.tolist() == [len(active), sum(active)]
        assert comm.all_reduce(torch.ones(1)).wait().item() == len(active)

    train(model, torch.optim.SGD(model.parameters(), **OPTIONS), extra)
    assert_same_model(model.module, train_alone(plain_model()))


def test_ddp_with_zero() -> None:
    """Joined ranks own parameters too, and update them with the gradients of the others."""
    for as_view in (False, True):
        model = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_view, **OPTIONS
        )
        train(model, zero)
        assert_same_model(model.module, train_alone(plain_model()))


def test_ddp_with_an_overlapping_zero() -> None:
    """The hook updates joined ranks' parameters too; means are over the whole group."""
    size = dist.get_world_size()
    for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
        model = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, **OPTIONS)
        model.register_comm_hook(None, wrap(allreduce_hook, model, zero))
        with Join([model]):
            for step in range(num_steps(dist.get_rank())):
                zero.zero_grad()
                (model(rows(dist.get_rank(), step)) ** 2).mean().backward()
        alone = train_alone(plain_model(), scale=lambda num_active: num_active / size)
        assert_same_model(model.module, alone)


def test_ddp_with_sync_batch_norm() -> None:
    model = DistributedDataParallel(make_model(SyncBatchNormOnCpu), bucket_cap_mb=0.0001)
    train(model, torch.optim.SGD(model.parameters(), **OPTIONS))
    assert_same_model(model.module, train_alone(make_model(nn.BatchNorm1d)))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate, fully_shard])
def test_a_norm_inside_the_model_costs_no_words(wrap: Any) -> None:
    model = wrap(make_model(SyncBatchNormOnCpu))
    optimizer = {"optimizer": None} if wrap is fully_shard else {}
    with record() as events, Join([model], **optimizer):
        for step in range(3):
            model(batch(dist.get_rank(), step)).sum().backward()
    assert len(events.by_feature("join")) == 3 + 1


def test_ddp_with_a_hook_of_the_users() -> None:
    """A hook that calls torch.distributed itself is DDP's all the same."""

    def mean_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model: Any = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, mean_hook)
    with Join([model]):
        for step in range(num_steps(dist.get_rank())):
            model.zero_grad()
            model(rows(dist.get_rank(), step)).sum().backward()
            active = [rank for rank in range(dist.get_world_size()) if step < num_steps(rank)]
            last_bias = model.module[-1].bias.grad
            assert last_bias is not None
            expected = ROWS * len(active) / dist.get_world_size()
            torch.testing.assert_close(last_bias, torch.full_like(last_bias, expected))
    dist.barrier()


def test_ddp_with_a_hook_of_several_collectives() -> None:
    """Its collectives come from a thread of their own."""
    model = DistributedDataParallel(plain_model(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, quantization_pertensor_hook)
    with Join([model]):
        for step in range(num_steps(dist.get_rank())):
            model(rows(dist.get_rank(), step)).sum().backward()
    dist.barrier()


def test_a_collective_inside_the_model() -> None:
    """What a model's forward calls is the user's own."""

    class Centered(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            count = torch.ones(1, dtype=torch.float64)
            dist.all_reduce(count)
            return inputs * count

    model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 1), Centered()).double())
    with Join([model]):
        for step in range(num_steps(dist.get_rank())):
            model.zero_grad()
            model(torch.ones(1, WIDTH, dtype=torch.float64)).sum().backward()
            active = [rank for rank in range(dist.get_world_size()) if step < num_steps(rank)]
            bias = model.module[0].bias.grad
            assert bias is not None
            assert bias.item() == len(active) * len(active) / dist.get_world_size()
    dist.barrier()


def test_a_collective_of_a_replicated_module_itself() -> None:
    """Its forward is the model's too, though the module is what joins."""

    class Counted(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            count = torch.ones(1)
            dist.all_reduce(count)
            counts.append(count.item())
            return super().forward(inputs)

    counts: list[float] = []
    model: Any = replicate(Counted(WIDTH, 1))
    with Join([model]):
        for _ in range(num_steps(dist.get_rank())):
            model(torch.ones(1, WIDTH)).sum().backward()
    ranks = range(dist.get_world_size())
    steps = range(num_steps(dist.get_rank()))
    assert counts == [sum(step < num_steps(rank) for rank in ranks) for step in steps]
    dist.barrier()
