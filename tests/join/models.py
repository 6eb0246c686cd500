"""A model and its batches, and torch's SyncBatchNorm on the CPU.

The kernels that torch has for GPUs only are here in Python. The autograd function of SyncBatchNorm, and so
every collective that it makes, is torch's own.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction

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


_mutex = threading.Lock()  # ranks may be threads
_installed: list[torch.library.Library] = []


def install_kernels() -> None:
    """Give torch the five kernels, once a process."""
    with _mutex:
        if not _installed:
            _installed.append(_new_library())


def _new_library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "CPU")
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel)
    return library


def batch_norm_stats(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rows.mean(0), (rows.var(0, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    rows: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    counts = counts.reshape(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = (invstds**-2 - eps + means**2) * counts
    var = squares.sum(0) / total - mean**2
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * var * total / (total - 1))
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(
    rows: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    return (rows - mean) * invstd * weight + bias


def batch_norm_backward_reduce(
    grad: Tensor,
    rows: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy, sum_dy_xmu = grad.sum(0), (grad * (rows - mean)).sum(0)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def batch_norm_backward_elemt(
    grad: Tensor,
    rows: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    return (grad - sum_dy / total - (rows - mean) * invstd**2 * sum_dy_xmu / total) * invstd * weight


class SyncBatchNormOnCpu(nn.SyncBatchNorm):
    """torch's, without its check that the input is on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        install_kernels()
        if self.training:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        group = self.process_group or dist.group.WORLD
        assert group is not None
        if not self.training or group.size() == 1:
            return nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        return SyncBatchNormFunction.apply(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            self.momentum,
            group,
            group.size(),
        )
