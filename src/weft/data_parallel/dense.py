"""A bucket of dense gradients: one flat buffer, and the gradients as views of it.

The buffer outlives the step, so nothing is copied out. It ends in one number for each parameter,
1 where this rank has a gradient for it and 0 where not, and in one that differs from step to step.
Summed with the rest, the former say which parameters no rank has used, and the latter whether all
ranks are at the same step: both without a message of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.data_parallel.buckets import FEATURE, Bucket, Member, Reduction, launch_plain
from weft.data_parallel.plan import BucketPlan
from weft.tensors import copy_all, view_in

# From here on a gradient is scaled while it is copied; smaller ones are copied as a batch, scaled in runs.
LARGE_NUMEL = 16 * 1024


class DenseBucket(Bucket):
    """Gradients in one flat buffer, as views of it."""

    def __init__(
        self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool, keeps_buffer: bool
    ) -> None:
        super().__init__(plan, members, index, is_last=is_last)
        self._keeps_buffer = keeps_buffer  # also while the user holds gradients of an earlier step
        self._flat = torch.empty(0)  # 1D: the gradients, then the marks
        self._marks = self._step_mark = self._flat  # pieces of it
        self._views: list[torch.Tensor] = []
        self._runs: list[torch.Tensor] = []  # 1D pieces of the buffer with small gradients only
        self._fresh_counts = (0, 0)  # of references, while nobody but us holds the buffer
        self._used: Sequence[bool] = ()
        self._untouched: dict[int, torch.Tensor] = {}

    def _allocate(self, group: ProcessGroup) -> None:
        self._flat = self._new_flat(group)
        self._views = [
            view_in(self._flat, offset, member.spec.shape, member.spec.strides)
            for member, offset in zip(self._members, self.plan.offsets, strict=True)
        ]
        setattr_all(self._views, "_weft_is_view")
        self._marks = self._flat[self.plan.numel : -1]
        self._step_mark = self._flat[-1:]
        self._runs = self._find_runs()
        self._fresh_counts = self._count_references()

    def _new_flat(self, group: ProcessGroup) -> torch.Tensor:
        numel = self.plan.numel + len(self.plan.params) + 1
        return comm.allocate((numel,), self.plan.dtype, self.plan.device, group)

    def _find_runs(self) -> list[torch.Tensor]:
        runs: list[tuple[int, int]] = []
        for member, offset in zip(self._members, self.plan.offsets, strict=True):
            numel = member.spec.numel
            if numel >= LARGE_NUMEL:
                continue
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + numel)
            else:
                runs.append((offset, offset + numel))
        return [self._flat[start:end] for start, end in runs]

    def _prepare_buffer(self, group: ProcessGroup, grads: Sequence[torch.Tensor | None]) -> None:
        if not self._views:
            self._allocate(group)
        elif not self._keeps_buffer and self._is_held(grads):
            self._allocate(group)  # a gradient that the user has kept keeps its values

    def _is_held(self, grads: Sequence[torch.Tensor | None]) -> bool:
        if any(grad is view for grad, view in zip(grads, self._views, strict=True)):
            return False  # they are being accumulated in place
        return any(
            now > fresh for now, fresh in zip(self._count_references(), self._fresh_counts, strict=True)
        )

    def _count_references(self) -> tuple[int, int]:
        """How many hold the views, as Python sees it, and their memory, as torch sees it."""
        return max(map(sys.getrefcount, self._views)), use_count(self._flat)

    @torch.no_grad()
    def collect(self, reduction: Reduction, used: Sequence[bool]) -> None:
        grads = [member.param.grad for member in self._members]
        self._prepare_buffer(reduction.group, grads)
        scale = 1.0 if reduction.hook is not None else 1.0 / reduction.divisor
        self._used = used
        self._untouched = {}
        small_views: list[torch.Tensor] = []
        small_grads: list[torch.Tensor] = []
        on_cpu = self.plan.device.type == "cpu"
        for at, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
            if grad is None:
                view.zero_()
                continue
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            is_large = on_cpu and view.numel() >= LARGE_NUMEL
            if grad is view:
                if not used[at]:
                    self._untouched[at] = view.clone()
                if is_large:
                    view.mul_(scale)
            elif is_large:
                torch.mul(grad, scale, out=view)
            else:
                small_views.append(view)
                small_grads.append(grad)
        if small_views:
            copy_all(small_views, small_grads)
        if scale != 1.0:
            for run in self._runs if on_cpu else [self._flat]:
                run.mul_(scale)
        self._marks.fill_(1)
        for at, is_used in enumerate(used):
            if not is_used:
                self._marks[at] = 0
        self._step_mark.fill_(reduction.mark())

    def launch(self, reduction: Reduction) -> None:
        flat, group = self._flat, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, flat[: self.plan.numel])
        else:
            self._pending = launch_plain(
                group, flat, lambda: comm.all_reduce(flat, group=group, feature=FEATURE)
            )

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> None:
        result = self._wait()
        if reduction.hook is not None and result is not None:
            self._take(result)
        elif self._can_count(reduction):
            reduction.check_step(self._step_mark.item().real)

    @torch.no_grad()
    def hand_out(
        self, held: Mapping[int, torch.Tensor], used_anywhere: Sequence[bool] | None
    ) -> Sequence[bool]:
        used = self._used
        if used_anywhere is not None:
            used = used_anywhere
        elif not all(used):
            used = [mark > 0 for mark in self._marks.abs().tolist()]
        for at, (member, view) in enumerate(zip(self._members, self._views, strict=True)):
            if not used[at]:
                if at in self._untouched:
                    view.copy_(self._untouched[at])
            elif at in held and held[at] is member.param.grad:
                held[at].copy_(view)
            else:
                member.param.grad = view
        self._untouched = {}
        return used

    def _take(self, result: torch.Tensor) -> None:
        """What a hook brought, unless it is in the buffer already."""
        payload = self._flat[: self.plan.numel]
        if result.numel() and (result.data_ptr() != payload.data_ptr() or result.dtype != payload.dtype):
            payload.copy_(result.view(-1))

    def _can_count(self, reduction: Reduction) -> bool:
        # A number on the GPU would stop the host; 16-bit floats count to 256 exactly.
        is_exact = self.plan.dtype.itemsize > 2 or reduction.group.size() <= 32
        return self.plan.device.type == "cpu" and is_exact

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return hasattr(grad, "_weft_is_view")  # of this buffer or of one before it


def use_count(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory. The one use of a private name, `_storage_Use_Count`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def setattr_all(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Mark tensors as what `name` says. A function of its own, so that no name is left for the last one."""
    for tensor in tensors:
        setattr(tensor, name, True)
