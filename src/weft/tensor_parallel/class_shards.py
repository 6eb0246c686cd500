"""Losses over classes of which each rank has some: plain local tensors, and three sums for a cross-entropy.

A position is a place in all dims but the classes'. Its logits x have log-probabilities l = x - log(sum of
exp x), and its loss is

    loss = -(sum over classes c of  a[c] * l[c]),   a[c] = hit * [c is the target] + keep * smooth[c]

where `hit` has the target's weight, `smooth` the label smoothing's share of each class, and `keep` is 0 where
the target is to be ignored. Ranks reduce the largest logit, then the sum of exponentials and the sum over a.
What is saved for backward is the logits and two numbers a position, and backward sends nothing.

All is computed in float32 at least. Every rank has all positions, and its own classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from weft import comm
from weft.autograd import traced_inside_only
from weft.tensor_parallel.axis import FEATURE
from weft.tensor_parallel.crossing import as_result

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class ClassShard:
    """The classes that a rank has, along `dim` of the logits: `num_own` from `start` on, of `num_classes`."""

    dim: int
    start: int
    num_own: int
    num_classes: int
    group: dist.ProcessGroup

    def launch_sum(self, tensor: torch.Tensor) -> comm.Handle[torch.Tensor]:
        """Start to sum what ranks have of each position."""
        return self._launch(tensor, ReduceOp.SUM)

    def launch_max(self, tensor: torch.Tensor) -> comm.Handle[torch.Tensor]:
        """Start to find the largest of what ranks have of each position."""
        return self._launch(tensor, ReduceOp.MAX)

    def _launch(self, tensor: torch.Tensor, op: Any) -> comm.Handle[torch.Tensor]:
        return comm.all_reduced(tensor, op, self.group, feature=FEATURE, label="loss")


@dataclass(frozen=True, eq=False)
class Aims:
    """What a loss wants, by position, as this rank sees it. Constants for autograd."""

    index: torch.Tensor  # of the target among the rank's own classes; 0 where it isn't
    is_own: torch.Tensor  # whether it is
    keep: torch.Tensor  # False where the target is ignored
    weight: torch.Tensor  # of the target, 0 where it is ignored: what a mean divides by
    hit: torch.Tensor
    smooth: torch.Tensor | None  # of the own classes; None without label smoothing
    whole: torch.Tensor  # the sum of a over all classes


def make_aims(
    target: torch.Tensor,
    shard: ClassShard,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> Aims:
    """The aims for targets that are classes; `weight` is of all classes, or None."""
    keep = target != ignore_index
    classes = torch.where(keep, target, 0)
    weights = keep.to(dtype) if weight is None else torch.where(keep, weight.to(dtype)[classes], 0)
    index = classes - shard.start
    is_own = keep & (index >= 0) & (index < shard.num_own)
    index = torch.where(is_own, index, 0)
    if smoothing == 0:
        return Aims(index, is_own, keep, weights, weights, None, weights)
    if weight is None:
        shares = torch.ones(shard.num_classes, dtype=dtype, device=target.device)
    else:
        shares = weight.to(dtype)
    shares = shares * (smoothing / shard.num_classes)
    hit = weights * (1.0 - smoothing)
    own = shares[shard.start : shard.start + shard.num_own]
    return Aims(index, is_own, keep, weights, hit, own, hit + keep * shares.sum())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float32 if dtype in HALVES else dtype


def cross_entropy(local: torch.Tensor, aims: Aims, shard: ClassShard) -> torch.Tensor:
    """The loss of each position, from logits."""
    return _CrossEntropy.apply(local, aims, shard)  # type: ignore[no-any-return]


def log_softmax(local: torch.Tensor, shard: ClassShard, dtype: torch.dtype) -> torch.Tensor:
    """The own classes' log-probabilities, from logits."""
    return _LogSoftmax.apply(local, shard, dtype)  # type: ignore[no-any-return]


def nll_loss(local: torch.Tensor, aims: Aims, shard: ClassShard) -> torch.Tensor:
    """The loss of each position, from log-probabilities."""
    return -_reduced(_aimed(local.to(wide_dtype(local.dtype)), aims, shard), shard)


# -- what ranks compute of their own classes -------------------------------------------


def _aimed(values: torch.Tensor, aims: Aims, shard: ClassShard) -> torch.Tensor:
    """The sum over the own classes of a * values, by position."""
    if shard.num_own == 0:
        return values.sum(shard.dim)
    found = values.gather(shard.dim, aims.index.unsqueeze(shard.dim)).squeeze(shard.dim)
    # Selected, not multiplied by zero: a class that is masked out has an infinite logit.
    total = torch.where(aims.is_own, found * aims.hit, 0)
    if aims.smooth is not None:
        total = total + torch.where(aims.keep, values.movedim(shard.dim, -1) @ aims.smooth, 0)
    return total


def _subtract_aims_(slope: torch.Tensor, scale: torch.Tensor, aims: Aims, shard: ClassShard) -> None:
    """slope -= scale * a, by position and own class."""
    if shard.num_own == 0:
        return
    hits = torch.where(aims.is_own, scale * aims.hit, 0)
    slope.scatter_add_(shard.dim, aims.index.unsqueeze(shard.dim), -hits.unsqueeze(shard.dim))
    if aims.smooth is not None:
        by_class = aims.smooth.view([-1 if dim == shard.dim else 1 for dim in range(slope.ndim)])
        slope.addcmul_((scale * aims.keep).unsqueeze(shard.dim), by_class, value=-1)


def _shift(values: torch.Tensor, shard: ClassShard) -> tuple[torch.Tensor, torch.Tensor]:
    """The values less the largest of all ranks', and that one (dim kept)."""
    if shard.num_own:
        peak = values.amax(shard.dim, keepdim=True)
    else:
        sizes = [1 if dim == shard.dim else size for dim, size in enumerate(values.shape)]
        peak = values.new_full(sizes, -math.inf)
    peak = shard.launch_max(peak).wait()
    return values - peak, peak


# -- for autograd ------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, aims: Aims, shard: ClassShard) -> torch.Tensor:
        shifted, peak = _shift(local.to(aims.hit.dtype), shard)
        aimed = shard.launch_sum(_aimed(shifted, aims, shard))
        total = shard.launch_sum(shifted.exp_().sum(shard.dim)).wait()
        ctx.save_for_backward(local, peak, total)
        ctx.aims, ctx.shard = aims, shard
        return torch.where(aims.keep, aims.whole * total.log() - aimed.wait(), 0)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        local, peak, total = ctx.saved_tensors
        aims: Aims = ctx.aims
        shard: ClassShard = ctx.shard
        (grad,) = grads
        if torch.is_grad_enabled():  # a second derivative is wanted: from parts that have one
            grad = _copied(grad, shard)
            slope = log_softmax(local, shard, grad.dtype).exp() * (grad * aims.whole).unsqueeze(shard.dim)
        else:
            scale = (grad * aims.whole / total).unsqueeze(shard.dim)
            slope = (local.to(grad.dtype) - peak).exp_().mul_(scale)
        _subtract_aims_(slope, grad, aims, shard)
        return slope.to(local.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, shard: ClassShard, dtype: torch.dtype) -> torch.Tensor:
        shifted, _ = _shift(local.to(wide_dtype(dtype)), shard)
        total = shard.launch_sum(shifted.exp().sum(shard.dim, keepdim=True)).wait()
        result = as_result(shifted.sub_(total.log_()).to(dtype))
        ctx.save_for_backward(result)
        ctx.shard, ctx.dtype = shard, local.dtype
        return result

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (result,) = ctx.saved_tensors
        wide = grads[0].to(wide_dtype(grads[0].dtype))
        total = _reduced(wide.sum(ctx.shard.dim, keepdim=True), ctx.shard)
        slope = wide - result.to(wide.dtype).exp() * _copied(total, ctx.shard)
        return slope.to(ctx.dtype), None, None


def _reduced(tensor: torch.Tensor, shard: ClassShard) -> torch.Tensor:
    """The sum over ranks. All ranks go on with it alike, and have the same gradient of it."""
    return _Reduced.apply(tensor, shard)  # type: ignore[no-any-return]


def _copied(tensor: torch.Tensor, shard: ClassShard) -> torch.Tensor:
    """What all ranks have alike, for each to go on with by itself: its gradient is the sum of theirs."""
    return _Copied.apply(tensor, shard)  # type: ignore[no-any-return]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shard: ClassShard) -> torch.Tensor:
        ctx.shard = shard
        return as_result(shard.launch_sum(tensor).wait())

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(grads[0], ctx.shard), None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shard: ClassShard) -> torch.Tensor:
        ctx.shard = shard
        return tensor.view_as(tensor)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(grads[0], ctx.shard), None
