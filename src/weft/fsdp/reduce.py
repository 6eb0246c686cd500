"""Reduce gradients: from the unsharded gradients that backward leaves to sharded means on the parameters.

A bucket is what one collective reduces: parameters of one dtype. Its reduction is launched in backward and
advances while backward goes on: reduce-scatter over the shard group, all-reduce over the replicas, division
and cast, delivery to the parameters, whose hooks run.

Invariant: ranks launch equal buckets in equal order; which of its gradients a rank lacks is its own affair,
they count as zeros. What a parameter without a gradient on this rank gets is param_group.py's to decide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from weft import comm
from weft.comm import Handle
from weft.comm.call import hosted_by
from weft.comm.record import note
from weft.errors import StateError
from weft.fsdp.all_gather import allocate_storage, free_storage, reallocates_cheaply
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.fsdp.order import bitmask
from weft.fsdp.param import ShardedParam, copy_to_rank_major
from weft.fsdp.policy import GroupSettings
from weft.tensors import contiguous_strides, copy_all, plan_spread, use_count, view_in

Grads = Sequence[torch.Tensor | None]


class GradReceiver(Protocol):
    """The param group whose gradients are reduced."""

    name: str
    delivered: int

    def deliver(self, param: ShardedParam, grad: Any, *, is_used: bool) -> None:
        """Take a parameter's mean; `is_used`: this rank had a gradient for it."""
        ...


@dataclass(frozen=True, slots=True)
class MeanPlan:
    """How a sum of gradients becomes their mean: the collectives' operator, and divisors around them."""

    averages: bool
    predivide_factor: float = 1.0
    postdivide_factor: float = 1.0

    @property
    def op(self) -> ReduceOp.RedOpType:
        """The operator of the collectives."""
        return ReduceOp.AVG if self.averages else ReduceOp.SUM


def plan_mean(
    dtype: torch.dtype, num_ranks: int, factor: float | None = None, *, sums_only: bool = False
) -> MeanPlan:
    """The mean over `num_ranks`, or the sum over `factor`.

    Divide by sqrt(N) before and after: fp16 neither overflows nor underflows.
    """
    divisor = float(num_ranks if factor is None else factor)
    if dtype is torch.float16:
        before = 2.0 ** round(math.log2(divisor) / 2) if divisor > 1 else 1.0
        return MeanPlan(averages=False, predivide_factor=before, postdivide_factor=divisor / before)
    if factor is None and not sums_only:
        return MeanPlan(averages=True)
    return MeanPlan(averages=False, postdivide_factor=divisor)


def plan_buckets(
    params: Sequence[ShardedParam], dtype_of: Callable[[ShardedParam], torch.dtype]
) -> list[list[ShardedParam]]:
    """Trainable parameters by what one collective can reduce: one dtype, and one reduce dtype."""
    buckets: dict[tuple[torch.dtype, torch.dtype], list[ShardedParam]] = {}
    for param in params:
        if param.sharded.requires_grad:
            buckets.setdefault((param.dtype, dtype_of(param)), []).append(param)
    return list(buckets.values())


class ReduceBucket:
    """Parameters whose gradients one collective reduces, with the buffers of their sharded gradients."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dp_mesh: DataParallelMesh,
        reduce_dtype: torch.dtype,
        settings: GroupSettings,
        *,
        is_pinned: bool = False,
    ) -> None:
        self._is_pinned = is_pinned  # sharded gradients, in the CPU's memory
        self.params = list(params)
        self.dp_mesh = dp_mesh
        self.settings = settings
        self.reduce_dtype = reduce_dtype
        self.dtype = params[0].dtype
        self.shard_device = params[0].local.device
        layouts = [param.layout for param in params]
        self.are_contiguous = [layout.has_contiguous_shards for layout in layouts]
        self.spread = plan_spread(
            [layout.padded_numel for layout in layouts],
            [layout.padded_shard_numel for layout in layouts],
            dp_mesh.shard_size,
        )
        self.partial_sum: torch.Tensor | None = None  # reduced over the shard group only
        self.partial_used = 0  # by index in the bucket
        self._sharded_grads: ShardedGrads | None = None
        self._unsharded: list[Any] | None = None
        self._all_bits = self._first_bit = 0
        self._scratch: torch.Tensor | None = None  # for sums that are only added to gradients

    def unsharded_params(self) -> list[Any]:
        """The unsharded parameters, on which backward leaves the gradients."""
        if self._unsharded is None or self._unsharded[0] is not self.params[0].unsharded:
            self._unsharded = [param.unsharded for param in self.params]
        return self._unsharded

    def all_bits(self) -> int:
        """A bit for each parameter."""
        if not self._all_bits or self._first_bit != self.params[0].bit:
            self._first_bit = self.params[0].bit
            self._all_bits = bitmask(param.bit for param in self.params)
        return self._all_bits

    def used_bits(self, grads: Grads) -> int:
        """A bit for each parameter with a gradient: among these, or in the partial sum sent with them."""
        if all(grad is not None for grad in grads):
            return self.all_bits()
        is_partial_sent = self.partial_sum is not None and self.settings.all_reduces_grads
        partial_used = self.partial_used if is_partial_sent else 0
        return bitmask(
            param.bit
            for at, (param, grad) in enumerate(zip(self.params, grads, strict=True))
            if grad is not None or partial_used >> at & 1
        )

    def pop_partial(self) -> tuple[torch.Tensor | None, int]:
        """The partial sum that goes with the reduction being launched, and its parameters with a gradient.

        Nothing waits any more then, so nobody launches another reduction for it.
        """
        if not self.settings.all_reduces_grads:
            return None, 0
        partial = (self.partial_sum, self.partial_used)
        self.drop_partial()
        return partial

    def drop_partial(self) -> None:
        """Forget the partial sum."""
        self.partial_sum, self.partial_used = None, 0

    def mean_plan(self) -> MeanPlan:
        """How sums become means."""
        settings = self.settings
        if settings.comm_hook is not None:
            return MeanPlan(averages=True)  # the hook's work
        num_ranks = self.dp_mesh.shard_size * self.dp_mesh.replicate_size
        return plan_mean(
            self.reduce_dtype, num_ranks, settings.gradient_divide_factor, sums_only=settings.sums_only
        )

    def sharded_grads(self) -> ShardedGrads:
        """Memory for this step's sharded gradients: last step's, if nobody holds them any more."""
        if self._sharded_grads is not None and not self._sharded_grads.is_held(self.params):
            allocate_storage(self._sharded_grads.flat)
        else:
            flat = torch.zeros(
                self.spread.shard_numel,
                dtype=self.dtype,
                device=self.shard_device,
                pin_memory=self._is_pinned,
            )
            self._sharded_grads = ShardedGrads(self.params, self.spread.shard_starts, flat)
        return self._sharded_grads

    def free_unheld_grads(self) -> None:
        """Free the memory of gradients that nobody holds, where it is cheap to allocate again."""
        if self._sharded_grads is None or not reallocates_cheaply(self.dp_mesh.device):
            return
        if not self._sharded_grads.is_held(self.params):
            free_storage(self._sharded_grads.flat)

    def take_scratch(self) -> torch.Tensor:
        """Memory for sums that don't stay."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            return scratch
        return torch.empty(self.spread.shard_numel, dtype=self.reduce_dtype, device=self.dp_mesh.device)

    def return_scratch(self, scratch: torch.Tensor) -> None:
        """The sums in it have been used."""
        if not reallocates_cheaply(scratch.device):
            self._scratch = scratch


class ShardedGrads:
    """Sharded gradients of one step: a flat buffer, and a view and a DTensor of it for each parameter.

    All of them are used again in the next step, unless the user still holds one: what is held keeps its
    values.
    """

    def __init__(self, params: Sequence[ShardedParam], starts: Sequence[int], flat: torch.Tensor) -> None:
        self.flat = flat  # in the parameters' dtype
        self._views = [
            view_in(flat, start, param.local_shape, contiguous_strides(param.local_shape))
            for param, start in zip(params, starts, strict=True)
        ]
        self.dtensors: list[DTensor] = [
            param.make_sharded_grad(view) for param, view in zip(params, self._views, strict=True)
        ]
        self._counts_unheld = (self._max_refcount(), use_count(flat))

    def is_held(self, params: Sequence[ShardedParam]) -> bool:
        """Whether somebody holds a gradient of an earlier step, be it the parameter itself."""
        max_refcount, flat_count = self._counts_unheld
        if use_count(self.flat) > flat_count or self._max_refcount() > max_refcount:
            return True
        return any(param.sharded.grad is not None for param in params)

    def _max_refcount(self) -> int:
        return max(map(sys.getrefcount, self.dtensors), default=0) + max(
            map(sys.getrefcount, self._views), default=0
        )


class GradReduction:
    """The reduction of one bucket, from its launch to the delivery of the means."""

    def __init__(self, group: GradReceiver, bucket: ReduceBucket, grads: Grads, index: int) -> None:
        self._group = group
        self._bucket = bucket
        self._index = index  # of the bucket, as comm hooks see it
        self._used = [grad is not None for grad in grads]
        self._mean_plan = bucket.mean_plan()
        self._sharded_grads = bucket.sharded_grads() if self._reduces_in_place() else None
        self._out = bucket.take_scratch() if self._sharded_grads is None else self._sharded_grads.flat
        self._partial_sum, self._partial_used = bucket.pop_partial()
        self._handle = self._launch(self._prepare(grads))
        self._is_scattered = False
        self._stays_partial = False

    def _reduces_in_place(self) -> bool:
        """Whether the collective can write where the sharded gradients will be."""
        bucket = self._bucket
        return (
            bucket.dtype == bucket.reduce_dtype
            and bucket.shard_device == bucket.dp_mesh.device
            and all(param.sharded.grad is None for param in bucket.params)
            and bucket.partial_sum is None
            and (bucket.dp_mesh.replicate_group is None or bucket.settings.all_reduces_grads)
        )

    def _prepare(self, grads: Grads) -> Grads:
        """The gradients in the reduce dtype, predivided; rank-major where shards aren't contiguous."""
        bucket = self._bucket
        dtype = bucket.reduce_dtype
        prepared = [grad if grad is None or grad.dtype == dtype else grad.to(dtype) for grad in grads]
        if not all(bucket.are_contiguous):
            for at, (grad, param) in enumerate(zip(prepared, bucket.params, strict=True)):
                if grad is not None and not bucket.are_contiguous[at]:
                    prepared[at] = copy_to_rank_major(grad, param.layout)
        factor = self._mean_plan.predivide_factor
        if factor != 1.0:
            torch._foreach_div_([grad for grad in prepared if grad is not None], factor)  # type: ignore[reportPrivateImportUsage]
        return prepared

    def _launch(self, grads: Grads) -> Handle[Any] | None:
        bucket = self._bucket
        settings = bucket.settings
        if settings.comm_hook is not None:
            settings.comm_hook.reduce(bucket, grads, self._out, self._index, self._group.name)
            return None
        if bucket.dp_mesh.shard_size == 1:
            _copy_in(self._out, grads, bucket.spread.shard_starts, bucket.spread.numels)
            return None
        if settings.custom_reduce_scatter is not None:
            self._reduce_scatter_custom(grads)
            return None
        return comm.reduce_scatter_spread(
            self._out,
            grads,
            bucket.spread,
            self._mean_plan.op,
            settings.reduce_scatter_group or bucket.dp_mesh.shard_group,
            feature=FEATURE,
            name=self._group.name,
        ).followed()

    def _reduce_scatter_custom(self, grads: Grads) -> None:
        """Reduce-scatter through the user's own implementation."""
        bucket, custom = self._bucket, self._bucket.settings.custom_reduce_scatter
        num_ranks, numel = bucket.dp_mesh.shard_size, bucket.spread.shard_numel
        with hosted_by(FEATURE):
            packed = custom.allocate(
                (num_ranks * numel,), dtype=bucket.reduce_dtype, device=bucket.dp_mesh.device
            )
        packed.zero_()
        rows = packed.view(num_ranks, numel)
        for grad, at, chunk in zip(
            grads, bucket.spread.shard_starts, bucket.spread.piece_numels, strict=True
        ):
            if grad is not None and chunk:
                copy_to_rows(rows, grad.reshape(-1), at, chunk)
        with hosted_by(FEATURE):
            work = custom(
                output_tensor=self._out,
                input_tensor=packed,
                group=bucket.dp_mesh.shard_group,
                op=self._mean_plan.op,
                async_op=False,
            )
            if work is not None:
                work.wait()

    @property
    def has_replicas(self) -> bool:
        """Whether an all-reduce follows the reduce-scatter."""
        return self._bucket.dp_mesh.replicate_size > 1

    def start_all_reduce(self) -> None:
        """Wait for the reduce-scatter, and launch the all-reduce over the replicas, if there are any."""
        if self._is_scattered:
            return
        self._is_scattered = True
        self.wait()
        bucket = self._bucket
        if not self.has_replicas:
            return
        used = sum(1 << at for at, is_used in enumerate(self._used) if is_used)
        if not bucket.settings.all_reduces_grads:
            # Kept until a backward that does.
            bucket.partial_sum = (
                self._out if bucket.partial_sum is None else bucket.partial_sum.add_(self._out)
            )
            bucket.partial_used |= used
            self._stays_partial = True
            return
        if self._partial_sum is not None:
            self._out.add_(self._partial_sum)
            used |= self._partial_used
            self._used = [bool(used >> at & 1) for at in range(len(self._used))]
            self._partial_sum = None
        if bucket.settings.comm_hook is None:
            self._handle = comm.all_reduce(
                self._out,
                self._mean_plan.op,
                bucket.dp_mesh.replicate_group,
                feature=FEATURE,
                label=self._group.name,
            ).followed()

    @torch.no_grad()
    def finish(self, scale: float) -> None:
        """Wait for the collectives, make means of the sums, and deliver them."""
        self.start_all_reduce()
        if not self._stays_partial:
            self.wait()
            self._run_all_reduce_hook()
            if self._mean_plan.postdivide_factor != 1.0:
                self._out.div_(self._mean_plan.postdivide_factor)
            if scale != 1.0:
                self._out.mul_(scale)
            self._deliver()
        mesh, spread = self._bucket.dp_mesh, self._bucket.spread
        itemsize = self._bucket.reduce_dtype.itemsize
        note(
            "reduce",
            FEATURE,
            self._group.name,
            mesh.shard_group or mesh.replicate_group,
            bytes_in=sum(spread.numels) * itemsize,
            bytes_out=spread.shard_numel * itemsize,
        )

    def wait(self) -> None:
        """Wait for the collective under way, needed or not."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _run_all_reduce_hook(self) -> None:
        settings = self._bucket.settings
        if settings.all_reduce_hook is None:
            return
        stream = settings.all_reduce_stream
        if stream is None:
            with hosted_by(FEATURE):
                settings.all_reduce_hook(self._out)
            return
        device: Any = torch.get_device_module(self._bucket.dp_mesh.device)
        stream.wait_stream(device.current_stream())
        with device.stream(stream), hosted_by(FEATURE):
            settings.all_reduce_hook(self._out)
        device.current_stream().wait_stream(stream)

    def _deliver(self) -> None:
        bucket, group = self._bucket, self._group
        if self._sharded_grads is not None:
            grads: list[Any] = list(self._sharded_grads.dtensors)
            if all(self._used) and set_grads(bucket.params, grads):
                group.delivered |= bucket.all_bits()
                return
        elif self._adds_in_place():
            self._add_in_place()
            bucket.return_scratch(self._out)
            grads = [None] * len(bucket.params)
        else:
            sharded_grads = bucket.sharded_grads()
            sharded_grads.flat.copy_(self._out)
            bucket.return_scratch(self._out)
            grads = list(sharded_grads.dtensors)
        for param, grad, is_used in zip(bucket.params, grads, self._used, strict=True):
            group.deliver(param, grad, is_used=is_used)

    def _adds_in_place(self) -> bool:
        """Whether every parameter has a gradient that its mean is simply added to."""
        bucket = self._bucket
        return (
            bucket.dtype == bucket.reduce_dtype
            and bucket.shard_device == bucket.dp_mesh.device
            and all(self._used)
            and all(
                param.sharded.grad is not None and not param.sharded._backward_hooks
                for param in bucket.params
            )
        )

    def _add_in_place(self) -> None:
        bucket = self._bucket
        targets = [param.sharded.grad._local_tensor.view(-1) for param in bucket.params]  # type: ignore[union-attr]
        sources = [
            self._out[start : start + target.numel()]
            for start, target in zip(bucket.spread.shard_starts, targets, strict=True)
        ]
        torch._foreach_add_(targets, sources)  # type: ignore[reportPrivateImportUsage]


class ReductionQueue:
    """The reductions under way in a backward, of all groups of a model, in the order of their launch.

    A group finishes its predecessor's before it launches its own: a reduction has the time of a layer's
    backward to arrive, and the memory of unsharded gradients is freed as backward goes on.
    """

    def __init__(self) -> None:
        self._reductions: list[GradReduction] = []
        self.mean_scale = 1.0  # of gradients, where ranks have run out of inputs

    def add(self, reduction: GradReduction) -> None:
        """Add a reduction that was launched."""
        self._reductions.append(reduction)

    def finish(self) -> None:
        """Wait for all of them, and deliver their means."""
        for reduction in self._reductions:
            if reduction.has_replicas:
                reduction.start_all_reduce()
        while self._reductions:
            self._reductions.pop(0).finish(self.mean_scale)

    def drop(self) -> None:
        """Wait for all of them, and forget the results."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            reduction.wait()


# Gradients and hooks of the sharded parameters. autograd never sees these parameters, so weft runs their
# hooks: tensor hooks on a gradient before it is added, post-accumulate hooks after.


def accumulate_grad(param: ShardedParam, grad: DTensor | None) -> None:
    """Set the parameter's gradient, or add to it, and run hooks. None: it is added already."""
    sharded: Any = param.sharded
    if grad is not None:
        hooks = sharded._backward_hooks
        if hooks:
            with hosted_by(FEATURE):
                for hook in list(hooks.values()):
                    changed = hook(grad)
                    grad = grad if changed is None else changed
        if sharded.grad is None:
            sharded.grad = grad
        else:
            _add_grad(param, sharded.grad, grad)
    hooks = sharded._post_accumulate_grad_hooks
    if hooks:
        # As autograd runs them; an optimizer says no_grad itself.
        with torch.enable_grad(), hosted_by(FEATURE):
            for hook in list(hooks.values()):
                hook(sharded)


def set_grads(params: Sequence[ShardedParam], grads: Sequence[DTensor]) -> bool:
    """Set all gradients at once, unless one is to be added or has hooks to run; whether they were set."""
    sharded: list[Any] = [param.sharded for param in params]
    for param in sharded:
        if param.grad is not None or param._backward_hooks or param._post_accumulate_grad_hooks:
            return False
    for param, grad in zip(sharded, grads, strict=True):
        param.grad = grad
    return True


def _add_grad(param: ShardedParam, total: Any, grad: Any) -> None:
    if not isinstance(total, DTensor):
        raise StateError(
            f"fully_shard: the gradient of {param.fqn} is a {type(total).__name__}; it must be a DTensor "
            "like the parameter, or None. Set it to None before backward."
        )
    total._local_tensor.add_(grad._local_tensor if isinstance(grad, DTensor) else grad)


# Copies into flat buffers


def copy_to_rows(rows: torch.Tensor, flat: torch.Tensor, start: int, chunk_numel: int) -> None:
    """Copy a gradient's shards into the rows of their ranks from `start` on, with zeros for padding."""
    num_full, num_rest = divmod(flat.numel(), chunk_numel)
    if num_full:
        full = flat[: num_full * chunk_numel].view(num_full, chunk_numel)
        rows[:num_full, start : start + chunk_numel].copy_(full)
    if num_full < len(rows):
        rows[num_full, start : start + num_rest].copy_(flat[num_full * chunk_numel :])
        rows[num_full, start + num_rest : start + chunk_numel].zero_()
        rows[num_full + 1 :, start : start + chunk_numel].zero_()


@torch.no_grad()
def _copy_in(out: torch.Tensor, grads: Grads, starts: Sequence[int], numels: Sequence[int]) -> None:
    """Copy gradients into the flat buffer, where nothing is sharded."""
    if any(grad is None for grad in grads):
        out.zero_()
    pairs = [
        (out[start : start + numel], grad.reshape(-1))
        for grad, start, numel in zip(grads, starts, numels, strict=True)
        if grad is not None
    ]
    if pairs:
        copy_all([target for target, _ in pairs], [source for _, source in pairs])
