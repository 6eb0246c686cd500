"""The buckets of a plan at work: collect gradients, launch their reduction, hand the mean out.

A step takes a bucket through `collect`, `launch` and `settle`, once each and in this
order. The buffer outlives the step: gradients are views of it, so nothing is copied out.

A dense buffer ends in one number for each parameter, 1 where this rank has a gradient for
it and 0 where not, and in one that differs from step to step. Summed with the rest, the former
say which parameters no rank has used, and the latter whether all ranks are at the same step:
both without a message of their own.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.data_parallel.plan import BucketPlan, ParamSpec
from weft.data_parallel.sparse import mean_sparse, no_entries
from weft.errors import DesyncError, InternalError, StateError
from weft.tensors import copy_all, view_in

FEATURE = "ddp"
# From here on a gradient is scaled while it is copied; smaller ones are copied as a batch, scaled in runs.
LARGE_NUMEL = 16 * 1024

Pending = comm.Handle[torch.Tensor] | Future[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter and how to tell the user of it."""

    param: torch.Tensor
    spec: ParamSpec


@dataclass(frozen=True, slots=True)
class Reduction:
    """How this step reduces: the same for all its buckets."""

    group: ProcessGroup
    divisor: int
    number: int  # of the reductions begun so far
    hook: GradHook | None = None
    hook_state: Any = None
    is_even: bool = True  # no rank takes part without inputs of its own

    def mark(self) -> int:
        """A small number that tells this reduction from those around it."""
        return 1 + self.number % 7

    def check_step(self, total: float) -> None:
        """Raise if the ranks' marks don't add up: somebody is at another step."""
        if self.is_even and total != self.mark() * self.group.size():
            state = state_of(self.group)
            raise DesyncError(
                f"rank {state.global_rank}: the ranks of {state.words()} reduced gradients of different "
                f"steps: here it is reduction {self.number}. A rank has left out a backward, or gone on "
                "after one that failed; make every rank run the same number of backwards, or use "
                "weft.join for uneven inputs."
            )


class Bucket(ABC):
    """One bucket of the plan. `Pending` is what its last launch is waited for with."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool) -> None:
        self.plan = plan
        self._members = members
        self._index = index
        self._is_last = is_last
        self._pending: Pending | None = None

    @abstractmethod
    def collect(self, reduction: Reduction, used: Sequence[bool]) -> None:
        """Bring the gradients that are there into the buffer. `used`: which came since the last reduction."""

    @abstractmethod
    def launch(self, reduction: Reduction) -> None:
        """Start the reduction of what was collected."""

    @abstractmethod
    def settle(
        self, reduction: Reduction, held: Mapping[int, torch.Tensor], used_anywhere: Sequence[bool] | None
    ) -> None:
        """Wait for the mean and make it the parameters' gradients.

        Gradients in `held`, by place in the bucket, were the user's before: the mean is copied
        into them. A parameter that no rank used is left as it was.
        """

    @abstractmethod
    def shadow(self, reduction: Reduction) -> None:
        """Launch a reduction with nothing of one's own, wait for it, and leave all gradients alone."""

    @abstractmethod
    def owns(self, at: int, grad: torch.Tensor) -> bool:
        """Whether this gradient lies in the bucket's own memory."""

    def abandon(self) -> None:
        """Wait for what was launched, if anything, and forget it."""
        self._wait()

    def _wait(self) -> torch.Tensor | None:
        """What the reduction brought, if one was launched."""
        pending, self._pending = self._pending, None
        if pending is None or isinstance(pending, comm.Handle):
            return None if pending is None else pending.wait()
        return hook_result(pending)

    def _call_hook(self, reduction: Reduction, buffer: torch.Tensor) -> Future[torch.Tensor]:
        params = [member.param for member in self._members]
        bucket = GradBucket(self._index, buffer, params, self.plan.offsets, is_last=self._is_last)
        return call_hook(reduction, bucket)


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
        self._pending = self._launch(reduction, self._flat)

    def _launch(self, reduction: Reduction, flat: torch.Tensor) -> Pending:
        if reduction.hook is None:
            return comm.all_reduce(flat, group=reduction.group, feature=FEATURE).followed()
        return self._call_hook(reduction, flat[: self.plan.numel])

    @torch.no_grad()
    def settle(
        self, reduction: Reduction, held: Mapping[int, torch.Tensor], used_anywhere: Sequence[bool] | None
    ) -> None:
        result = self._wait()
        if reduction.hook is not None and result is not None:
            self._take(result)
        elif self._can_count(reduction):
            reduction.check_step(self._step_mark.item().real)
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

    def _take(self, result: torch.Tensor) -> None:
        """What a hook brought, unless it is in the buffer already."""
        payload = self._flat[: self.plan.numel]
        if result.numel() and (result.data_ptr() != payload.data_ptr() or result.dtype != payload.dtype):
            payload.copy_(result.view(-1))

    def _can_count(self, reduction: Reduction) -> bool:
        # A number on the GPU would stop the host; 16-bit floats count to 256 exactly.
        is_exact = self.plan.dtype.itemsize > 2 or reduction.group.size() <= 32
        return self.plan.device.type == "cpu" and is_exact

    def shadow(self, reduction: Reduction) -> None:
        # In other memory: the user's gradients are views of the buffer.
        self._pending = self._launch(reduction, self._new_flat(reduction.group))
        self._wait()

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return hasattr(grad, "_weft_is_view")  # of this buffer or of one before it


class SparseBucket(Bucket):
    """One parameter with sparse gradients, which travel as entries."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool) -> None:
        super().__init__(plan, members, index, is_last=is_last)
        self._param = members[0].param
        self._grad = torch.empty(0)
        self._is_used = False

    @torch.no_grad()
    def collect(self, reduction: Reduction, used: Sequence[bool]) -> None:
        grad = self._param.grad
        self._is_used = used[0]
        if grad is None:
            self._grad = no_entries(self._param)
        else:
            self._grad = (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce()

    def launch(self, reduction: Reduction) -> None:
        self._pending = self._launch(reduction, self._grad)

    def _launch(self, reduction: Reduction, grad: torch.Tensor) -> Pending:
        if reduction.hook is None:
            return mean_sparse(grad, reduction.divisor, reduction.group).followed()
        return self._call_hook(reduction, grad)

    @torch.no_grad()
    def settle(
        self, reduction: Reduction, held: Mapping[int, torch.Tensor], used_anywhere: Sequence[bool] | None
    ) -> None:
        mean = self._wait()
        if mean is None:
            raise InternalError("a sparse bucket was settled before it was launched")
        is_used = self._is_used if used_anywhere is None else used_anywhere[0]
        if not is_used and mean.is_sparse and mean._nnz() == 0:
            return
        grad = self._param.grad
        if grad is not None and held.get(0) is grad:
            grad.copy_(mean)
        else:
            self._param.grad = mean.to_dense() if grad is not None and not grad.is_sparse else mean

    def shadow(self, reduction: Reduction) -> None:
        self._pending = self._launch(reduction, no_entries(self._param))
        self._wait()

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return grad.is_sparse  # made anew in each step


def call_hook(reduction: Reduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """Call the hook and check what it returns."""
    assert reduction.hook is not None
    future = cast("object", reduction.hook(reduction.hook_state, bucket))
    if not isinstance(future, torch._C.Future):  # which torch.futures.Future is, and what its `then` returns
        raise StateError(
            f"gradient hook {_name(reduction.hook)}: callback must return a torch.futures.Future object, "
            f"but got {type(future).__name__}. Return comm.all_reduce(...).future(), or a Future that is set."
        )
    return cast("Future[torch.Tensor]", future)


def hook_result(future: Future[Any]) -> torch.Tensor:
    """The tensor that a hook's future brings; a list with one tensor will do."""
    result: Any = future.wait()
    if isinstance(result, list | tuple) and len(result) == 1:  # type: ignore[arg-type]
        result = result[0]
    if not isinstance(result, torch.Tensor):
        raise StateError(f"a gradient hook's future must bring a tensor, it brought {type(result).__name__}.")
    return result


def setattr_all(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Mark tensors as what `name` says. A function of its own, so that no name is left for the last one."""
    for tensor in tensors:
        setattr(tensor, name, True)


def _name(hook: GradHook) -> str:
    return getattr(hook, "__qualname__", str(hook))


def use_count(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory. The one use of a private name, `_storage_Use_Count`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
