"""The flat buffer of a bucket: gradients as views of it, and the marks behind them.

The buffer ends in one number for each parameter, 1 where this rank has a gradient for it and 0 where
not, and in one that differs from step to step. Summed with the rest, the former say which
parameters no rank has used, and the latter whether all ranks are at the same step: both without a
message of their own.
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
from weft.data_parallel.members import Member
from weft.data_parallel.plan import BucketPlan, ParamSpec
from weft.errors import InternalError
from weft.tensors import contiguous_strides, copy_all, local_of, use_count, view_in

Grads = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Small gradients that lie side by side: those from `start` up to `stop` of the bucket."""

    start: int
    stop: int
    piece: torch.Tensor  # 1D, of the buffer
    is_plain: tuple[bool, ...]  # one-dimensional already
    is_contiguous: bool  # each of them, so that they can be strung together


class FlatGradients:
    """One buffer for all gradients of a bucket.

    `views` are the local gradients, `shown` what users get of them: the same, or DTensors around them.
    """

    def __init__(self, plan: BucketPlan, members: Sequence[Member], group: ProcessGroup) -> None:
        specs = [member.spec for member in members]
        numel = plan.numel + len(plan.params) + 1
        self.flat = comm.allocate((numel,), plan.dtype, plan.device, group)  # 1D
        self.payload = self.flat[: plan.numel]
        self._marks = self.flat[plan.numel : -1]
        self._step_mark = self.flat[-1:]
        self.views = [
            view_in(self.flat, offset, spec.shape, spec.strides)
            for spec, offset in zip(specs, plan.offsets, strict=True)
        ]
        self.shown = self.views
        self._watched = [self.views]  # what the user may hold; those of one list are held alike by weft
        if any(member.whole is not None for member in members):
            self.shown = [member.shown(view) for member, view in zip(members, self.views, strict=True)]
            self._watched = _sort_by_holder(self.views, self.shown)
        _mark_as_views(self.shown)
        self._large = [at for at, spec in enumerate(specs) if spec.numel >= LARGE_NUMEL]
        self._runs = _find_runs(self.payload, plan.offsets, specs)
        self._on_cpu = plan.device.type == "cpu"
        self._pointers = self._find_pointers()
        self._fresh_counts = (self._count_names(), use_count(self.flat))

    # Who holds it

    def is_spoiled(self) -> bool:
        """Whether a view has got other memory: by `param.grad.data = ...`, as `module.to` does too."""
        if self.shown is not self.views:
            inside = map(local_of, self.shown)
            if any(map(operator.is_not, inside, self.views)):
                return True
        return self._find_pointers() != self._pointers

    def is_kept(self, grads: Grads) -> bool:
        """Whether the user still holds gradients of an earlier step, which shall keep their values."""
        fresh_names, fresh_uses = self._fresh_counts
        if use_count(self.flat) > fresh_uses:
            return True
        if self._count_names() == fresh_names:
            return False
        # One that is a parameter's gradient now is named by `grads`, and is added to in place.
        return any(map(operator.is_not, self.shown, grads))

    def _count_names(self) -> list[int]:
        """By how many names Python knows the tensor that has the most of them, by list."""
        return [max(map(sys.getrefcount, tensors)) for tensors in self._watched]

    def _find_pointers(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self.views)]

    # Gradients in

    def place(self, at: int, scale: float) -> tuple[torch.Tensor, float]:
        """Where a large gradient is made that is not copied, and what it is multiplied by there."""
        if not self._on_cpu:  # one kernel scales all of the buffer
            raise InternalError("a gradient is made in a bucket that is not on the CPU")
        return self.views[at], scale

    def fill(self, grads: Grads, scale: float, placed: Set[int] = frozenset()) -> None:
        """Copy the gradients in, times `scale`; zeros where there is none. Those in place are only scaled.

        Those that were `placed` are there as `place` said.
        """
        if {*map(type, grads)} == {torch.Tensor} and not any(map(operator.is_, grads, self.views)):
            try:
                self._fill_batched(grads, scale, placed)  # type: ignore[arg-type]
            except RuntimeError:  # one that is sparse, or lies otherwise than its parameter
                pass
            else:
                return
        self._fill_each(grads, scale, placed)

    def _fill_batched(self, grads: Sequence[torch.Tensor], scale: float, placed: Set[int]) -> None:
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
            if at not in placed:
                torch.mul(grads[at], scale, out=self.views[at])

    def _fill_each(self, grads: Grads, scale: float, placed: Set[int]) -> None:
        for at, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
            if at in placed:
                continue
            if grad is None:
                view.zero_()
            elif grad is not view:
                view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
            if placed:
                self._scale(view, scale)
        if not placed:
            self._scale(self.payload, scale)

    @staticmethod
    def _scale(tensor: torch.Tensor, scale: float) -> None:
        if scale != 1.0:
            tensor.mul_(scale)

    # Marks

    def set_marks(self, used: Sequence[bool], step_mark: int) -> None:
        """Say which gradients are this rank's, and at which step it is."""
        self._marks.fill_(1)
        if not all(used):
            check_used(self._marks.device)
            for at, is_used in enumerate(used):
                if not is_used:
                    self._marks[at] = 0
        self._step_mark.fill_(step_mark)

    def sum_of_step_marks(self, num_ranks: int) -> float | None:
        """What the ranks' step marks came to; None where it can't be told without a price, or exactly."""
        return sum_of_step_marks(self._step_mark, num_ranks)

    def used_anywhere(self) -> list[bool]:
        """After the reduction: which parameters some rank has used."""
        return [mark > 0 for mark in self._marks.abs().tolist()]


def check_used(device: torch.device) -> None:
    """Raise StateError where parameters without a gradient can't be asked about, in a captured step."""
    check_host_read(
        device,
        "some parameters got no gradient on this rank, so that it has to read whether another rank has one",
        "Capture steps that use all parameters, or leave the others out of DDP or replicate.",
    )


def sum_of_step_marks(mark: torch.Tensor, num_ranks: int) -> float | None:
    """The number in a reduced step mark; None where it can't be told without a price, or exactly."""
    # A number on the GPU would stop the host; 16-bit floats count to 256 exactly.
    if not mark.is_cpu or (mark.dtype.itemsize <= 2 and num_ranks > 32):
        return None
    return mark.item().real


def is_view_of_bucket(grad: torch.Tensor) -> bool:
    """Whether a gradient lies in a bucket's buffer, this step's or an earlier one's."""
    return hasattr(grad, "_weft_is_view")


def _sort_by_holder(views: list[torch.Tensor], shown: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views that are shown themselves, those inside of DTensors, and these DTensors, as far as there are."""
    pairs = list(zip(views, shown, strict=True))
    plain = [view for view, other in pairs if view is other]
    inside = [view for view, other in pairs if view is not other]
    outside = [other for view, other in pairs if view is not other]
    return [tensors for tensors in (plain, inside, outside) if tensors]


def _mark_as_views(views: Sequence[torch.Tensor]) -> None:
    # A function of its own, so that no name is left that holds the last of them.
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
