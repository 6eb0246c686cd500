"""SyncBatchNorm under Join: statistics and gradients are those of the active ranks' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.join_bodies.batch_norm_on_cpu import SyncBatchNormOnCpu
from weft import record
from weft.join import Join, Joinable, JoinHook

WIDTH = 3


def make_model(norm: type[nn.Module]) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model.double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2 + rank, WIDTH, generator=generator, dtype=torch.float64)


class Reduced(nn.Module, Joinable):
    """Sums gradients over ranks: those of the last layer at once in backward, the others at its end.

    So SyncBatchNorm's calls stand before, between and after its own.
    """

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module = module
        last = module[-1].weight
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


def statistics_and_gradients(num_without: int = 0) -> None:
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


def a_rank_without_inputs() -> None:
    statistics_and_gradients(num_without=1)


def a_norm_outside_of_the_joinables() -> None:
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


def no_words_while_all_are_active() -> None:
    """A norm inside a Joinable costs nothing more under Join."""
    reduced = Reduced(make_model(SyncBatchNormOnCpu))
    with record() as events, Join([reduced]):
        for step in range(3):
            reduced(batch(dist.get_rank(), step)).sum().backward()
            reduced.finish()
            update(reduced)
    assert len(events.by_feature("join")) == 3 + 1


BODIES = [
    no_words_while_all_are_active,
    statistics_and_gradients,
    a_rank_without_inputs,
    a_norm_outside_of_the_joinables,
]
