"""The flat buffer of a bucket: gradients as views of it, and what travels behind them.

Layout: the gradients, then one flag for each parameter (1 where this rank has a gradient for it, else 0),
then one mark that differs from step to step. Reduced with the rest, the flags tell which parameters no rank
has used, and the mark whether all ranks are at the same step: both without a collective of their own.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm.graph_capture import check_host_read
from weft.compiler import LARGE_NUMEL
from weft.data_parallel.bucket_plan import BucketPlan, ParamSpec
from weft.data_parallel.parameters import DDPParam
from weft.errors import InternalError
from weft.tensors import contiguous_strides, copy_all, local_of, use_count, view_in

Grads = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Small gradients side by side: those from `start` up to `stop` of the bucket."""

    start: int
    stop: int
    piece: torch.Tensor  # their part of the buffer, 1D
    is_plain: tuple[bool, ...]  # those that are 1D
    is_contiguous: bool  # all of them


class FlatGradients:
    """One buffer for all gradients of a bucket.

    `views` are the local gradients; `grad_views` what becomes `.grad`: the same, or DTensors around them.
    """

    def __init__(self, plan: BucketPlan, ddp_params: Sequence[DDPParam], group: ProcessGroup) -> None:
        specs = [ddp_param.spec for ddp_param in ddp_params]
        numel = plan.numel + len(plan.params) + 1
        self.flat = comm.allocate((numel,), plan.dtype, plan.device, group)  # 1D
        self.payload = self.flat[: plan.numel]
        self._used_flags = self.flat[plan.numel : -1]
        self._step_mark = self.flat[-1:]
        self.views = [
            view_in(self.flat, offset, spec.shape, spec.strides)
            for spec, offset in zip(specs, plan.offsets, strict=True)
        ]
        self.grad_views = self.views
        self._held_views = [self.views]  # what the user may hold; weft has equally many references to each
        if any(ddp_param.dtensor_spec is not None for ddp_param in ddp_params):
            self.grad_views = [
                ddp_param.as_grad(view) for ddp_param, view in zip(ddp_params, self.views, strict=True)
            ]
            self._held_views = _sort_by_references(self.views, self.grad_views)
        _mark_as_views(self.grad_views)
        self._large = [at for at, spec in enumerate(specs) if spec.numel >= LARGE_NUMEL]
        self._runs = _find_runs(self.payload, plan.offsets, specs)
        self._on_cpu = plan.device.type == "cpu"
        self._pointers = self._find_pointers()
        self._initial_counts = (self._count_references(), use_count(self.flat))

    # Who else holds it

    def has_detached_views(self) -> bool:
        """Whether a view has other memory now: by `param.grad.data = ...`, as in `module.to`."""
        if self.grad_views is not self.views:
            inside = map(local_of, self.grad_views)
            if any(map(operator.is_not, inside, self.views)):
                return True
        return self._find_pointers() != self._pointers

    def is_held_by_user(self, grads: Grads) -> bool:
        """Whether the user holds gradients of an earlier step, which must keep their values."""
        initial_references, initial_uses = self._initial_counts
        if use_count(self.flat) > initial_uses:
            return True
        if self._count_references() == initial_references:
            return False
        # A view that is a parameter's gradient now is referenced by `grads`, and is added to in place.
        return any(map(operator.is_not, self.grad_views, grads))

    def _count_references(self) -> list[int]:
        """The highest reference count of each list's tensors."""
        return [max(map(sys.getrefcount, tensors)) for tensors in self._held_views]

    def _find_pointers(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self.views)]

    # Filling it

    def destination(self, at: int, scale: float) -> tuple[torch.Tensor, float]:
        """The view in which a large gradient is made, and the factor for it."""
        if not self._on_cpu:  # one kernel scales all of the buffer
            raise InternalError("a gradient is made in a bucket that is not on the CPU")
        return self.views[at], scale

    def fill(self, grads: Grads, scale: float, in_place: Set[int] = frozenset()) -> None:
        """Copy the gradients in, times `scale`; zeros where there is none. Views of it are only scaled.

        Those that are `in_place`, by index, have been made at their `destination`.
        """
        if {*map(type, grads)} == {torch.Tensor} and not any(map(operator.is_, grads, self.views)):
            try:
                self._fill_batched(grads, scale, in_place)  # type: ignore[arg-type]
            except RuntimeError:  # a sparse gradient, or one with other strides than its parameter
                pass
            else:
                return
        self._fill_each(grads, scale, in_place)

    def _fill_batched(self, grads: Sequence[torch.Tensor], scale: float, in_place: Set[int]) -> None:
        if not self._on_cpu:
            copy_all(self.views, grads)
            self._scale(self.payload, scale)
            return
        for run in self._runs:
            parts = grads[run.start : run.stop]
            if run.is_contiguous:
                flat = [
                    part if plain else part.view(-1) for part, plain in zip(parts, run.is_plain, strict=True)
                ]
                torch.cat(flat, out=run.piece)
            else:
                copy_all(self.views[run.start : run.stop], parts)
            self._scale(run.piece, scale)
        for at in self._large:
            if at not in in_place:
                torch.mul(grads[at], scale, out=self.views[at])

    def _fill_each(self, grads: Grads, scale: float, in_place: Set[int]) -> None:
        for at, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
            if at in in_place:
                continue
            if grad is None:
                view.zero_()
            elif grad is not view:
                view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
            if in_place:
                self._scale(view, scale)
        if not in_place:
            self._scale(self.payload, scale)

    @staticmethod
    def _scale(tensor: torch.Tensor, scale: float) -> None:
        if scale != 1.0:
            tensor.mul_(scale)

    # Flags and mark

    def set_flags(self, used: Sequence[bool], step_mark: int) -> None:
        """Set which parameters this rank has used, and the mark of its step."""
        self._used_flags.fill_(1)
        if not all(used):
            check_flags_readable(self._used_flags.device)
            for at, is_used in enumerate(used):
                if not is_used:
                    self._used_flags[at] = 0
        self._step_mark.fill_(step_mark)

    def sum_of_step_marks(self, num_ranks: int) -> float | None:
        """The sum of the ranks' step marks; None where reading it is inexact, or waits for a GPU."""
        return sum_of_step_marks(self._step_mark, num_ranks)

    def used_globally(self) -> list[bool]:
        """After the reduction: which parameters some rank has used."""
        return [mark > 0 for mark in self._used_flags.abs().tolist()]


def check_flags_readable(device: torch.device) -> None:
    """Raise StateError where the flags would have to be read in a captured step."""
    check_host_read(
        device,
        "some parameters got no gradient on this rank, so that it has to read whether another rank has one",
        "Capture steps that use all parameters, or leave the others out of DDP or replicate.",
    )


def sum_of_step_marks(mark: torch.Tensor, num_ranks: int) -> float | None:
    """The value of a reduced step mark; None where reading it is inexact, or waits for a GPU."""
    # 16-bit floats count to 256 exactly.
    if not mark.is_cpu or (mark.dtype.itemsize <= 2 and num_ranks > 32):
        return None
    return mark.item().real


def is_view_of_bucket(grad: torch.Tensor) -> bool:
    """Whether a gradient lies in a bucket's buffer, this step's or an earlier one's."""
    return hasattr(grad, "_weft_is_view")


def _sort_by_references(
    views: list[torch.Tensor], grad_views: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Plain views, views inside of DTensors, and these DTensors: weft holds each kind differently often."""
    pairs = list(zip(views, grad_views, strict=True))
    plain = [view for view, other in pairs if view is other]
    inside = [view for view, other in pairs if view is not other]
    outside = [other for view, other in pairs if view is not other]
    return [tensors for tensors in (plain, inside, outside) if tensors]


def _mark_as_views(views: Sequence[torch.Tensor]) -> None:
    # A function of its own: no variable is left that references the last of them.
    for view in views:
        view._weft_is_view = True  # type: ignore[attr-defined]


def _find_runs(payload: torch.Tensor, offsets: Sequence[int], specs: Sequence[ParamSpec]) -> list[Run]:
    runs: list[Run] = []
    start = 0
    while start < len(specs):
        stop = start
        while stop < len(specs) and specs[stop].numel < LARGE_NUMEL:
            stop += 1
        if stop > start:
            inside = specs[start:stop]
            piece = payload[offsets[start] : offsets[stop - 1] + inside[-1].numel]
            is_contiguous = all(spec.strides == contiguous_strides(spec.shape) for spec in inside)
            runs.append(
                Run(start, stop, piece, tuple(len(spec.shape) == 1 for spec in inside), is_contiguous)
            )
        start = stop + 1
    return runs
