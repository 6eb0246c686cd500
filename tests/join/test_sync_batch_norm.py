"""SyncBatchNorm under Join: statistics and gradients are those of the active ranks' rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.join.models import WIDTH, SyncBatchNormOnCpu, batch, make_model
from tests.ranks import run_on
from weft import DistributedDataParallel, record
from weft.join import Join, Joinable, JoinHook

pytestmark = [run_on(threads=(2, 4)), run_on(weft=4, gloo=4, full=True)]


class Reduced(nn.Module, Joinable):
    """Sums gradients over ranks: those of the last layer at once in backward, the others at its end.

    So SyncBatchNorm's calls stand before, between and after its own.
    """

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module = module
        last: Any = module[-1].weight
        self.early = [last]
        self.late = [param for param in module.parameters() if param is not last]
        last.register_post_accumulate_grad_hook(lambda param: self._sum(self.early))

    def forward(self, rows: Tensor) -> Tensor:
        Join.notify_join_context(self)
        return self.module(rows)

    def finish(self) -> None:
        self._sum(self.late)

    def _sum(self, params: list[nn.Parameter]) -> None:
        grads = [param.grad for param in params]
        flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([param.numel() for param in params]), strict=True):
            assert grad is not None
            grad.copy_(part.view_as(grad))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return ReducedHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class ReducedHook(JoinHook):
    def __init__(self, reduced: Reduced) -> None:
        self.reduced = reduced

    def main_hook(self) -> None:
        for params in (self.reduced.early, self.reduced.late):
            dist.all_reduce(torch.zeros(sum(param.numel() for param in params), dtype=torch.float64))


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.sub_(0.05 * param.grad)
            param.grad = None


@pytest.mark.parametrize("num_without", [0, 1])
def test_statistics_and_gradients(num_without: int) -> None:
    """Rank r makes 1 + r steps; the first `num_without` ranks make none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [0 if other < num_without else 1 + other for other in range(size)]
    model = make_model(SyncBatchNormOnCpu)
    reduced = Reduced(model)
    alone = make_model(nn.BatchNorm1d)
    with Join([reduced]):
        for step in range(counts[rank]):
            (reduced(batch(rank, step)) ** 2).sum().backward()
            reduced.finish()
            rows = torch.cat([batch(other, step) for other in range(size) if step < counts[other]])
            (alone(rows) ** 2).sum().backward()
            for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(param.grad, expected.grad, rtol=1e-9, atol=1e-9)
            update(model)
            update(alone)
            torch.testing.assert_close(model[1].running_mean, alone[1].running_mean, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(model[1].running_var, alone[1].running_var, rtol=1e-12, atol=1e-12)
    dist.barrier()


def test_a_norm_outside_of_the_joinables() -> None:
    """A teacher that runs before the step begins."""
    rank, size = dist.get_rank(), dist.get_world_size()
    teacher, alone = SyncBatchNormOnCpu(WIDTH).double(), nn.BatchNorm1d(WIDTH).double()
    reduced = Reduced(make_model(SyncBatchNormOnCpu))
    with Join([reduced]):
        for step in range(1 + rank):
            target = teacher(batch(rank, step)).sum().detach()
            alone(torch.cat([batch(other, step) for other in range(step, size)]))
            torch.testing.assert_close(teacher.running_mean, alone.running_mean, rtol=1e-12, atol=1e-12)
            (reduced(batch(rank, step)) - target).sum().backward()
            reduced.finish()
            update(reduced)
    dist.barrier()


def test_no_words_while_all_are_active() -> None:
    """A norm inside a Joinable costs nothing more under Join."""
    reduced = Reduced(make_model(SyncBatchNormOnCpu))
    with record() as events, Join([reduced]):
        for step in range(3):
            reduced(batch(dist.get_rank(), step)).sum().backward()
            reduced.finish()
            update(reduced)
    assert len(events.by_feature("join")) == 3 + 1


# torch's own, which wants a GPU


def make_float(norm: Any) -> nn.Sequential:
    return nn.Sequential(*make_model(norm)).float()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@run_on(gpu=(2, 4), gpu_threads=(2, 4), nccl=(2, 4), timeout=120)
def test_torchs_own_inside_data_parallel() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = DistributedDataParallel(make_float(nn.SyncBatchNorm).cuda(), bucket_cap_mb=0.0001)
    alone = make_float(nn.BatchNorm1d)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone)]
    with Join([model]):
        for step in range(1 + rank):
            active = [other for other in range(size) if step <= other]
            for optimizer in optimizers:
                optimizer.zero_grad()
            # DDP divides by the size of the group, so the single process does as well.
            (model(batch(rank, step).float().cuda()) ** 2).sum().backward()
            rows = torch.cat([batch(other, step).float() for other in active])
            ((alone(rows) ** 2).sum() / size).backward()
            for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
                assert param.grad is not None
                assert expected.grad is not None
                assert_close(param.grad, expected.grad)
            for optimizer in optimizers:
                optimizer.step()
            assert_close(model.module[1].running_mean, alone[1].running_mean)
            assert_close(model.module[1].running_var, alone[1].running_var)
            metric = torch.ones(1, device="cuda")
            dist.all_reduce(metric)
            assert metric.item() == len(active)
    dist.barrier()
