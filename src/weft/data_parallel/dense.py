"""A bucket of dense gradients. They are views of its buffer, so nothing is copied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm.group import has_imagined_peers
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.buckets import Bucket, Reduction, launch_plain
from weft.data_parallel.flat_gradients import FlatGradients, is_view_of_bucket
from weft.data_parallel.members import Member, local_grads
from weft.data_parallel.plan import BucketPlan
from weft.errors import InternalError, StateError
from weft.tensors import grads_of, local_of


class DenseBucket(Bucket):
    """Gradients in one flat buffer, which outlives the step."""

    def __init__(
        self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool, keeps_buffer: bool
    ) -> None:
        super().__init__(plan, members, index, is_last=is_last)
        self._params = [member.param for member in members]
        self._keeps_buffer = keeps_buffer  # also while the user holds gradients of an earlier step
        self._gradients: FlatGradients | None = None
        self._untouched: dict[int, torch.Tensor] = {}  # what parameters get back that nobody used
        self._held: dict[int, torch.Tensor] = {}  # the user's own memory, which the mean is copied into
        self._opened: Reduction | None = None  # in which gradients are made in the buffer, and which ones
        self._placed: set[int] = set()

    @property
    def gradients(self) -> FlatGradients:
        """The buffer, from the first step on."""
        if self._gradients is None:
            raise InternalError("a bucket was used before it had collected anything")
        return self._gradients

    @torch.no_grad()
    def take(self, reduction: Reduction, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bring these gradients into the buffer, in place of the parameters' own; the buffer.

        Those that were made there are left alone, whatever stands for them.
        """
        buffer = self._open(reduction)
        self._held, self._untouched, self.used = {}, {}, [True] * len(grads)
        buffer.fill(grads, reduction.scale, self._placed)
        self._opened = None
        buffer.set_marks(self.used, reduction.mark(self.plan.dtype))
        return buffer.flat

    def place(self, reduction: Reduction, at: int) -> tuple[torch.Tensor, float]:
        """Where a gradient can be made in the buffer itself, and what it is to be multiplied by there."""
        buffer = self._open(reduction)
        self._placed.add(at)
        return buffer.place(at, reduction.scale)

    def _open(self, reduction: Reduction) -> FlatGradients:
        """The buffer for a reduction that comes in parts."""
        if self._opened is not reduction:
            # What a graph handed out before may lie in the buffer, and autograd adds to it later.
            self._make_room([None] * len(self._params), reduction.group, is_for_graph=True)
            self._opened, self._placed = reduction, set()
        return self.gradients

    def _make_room(
        self, grads: Sequence[torch.Tensor | None], group: ProcessGroup, *, is_for_graph: bool = False
    ) -> FlatGradients:
        """The buffer, or a new one where the user holds gradients that lie in it."""
        buffer, must_look = self._gradients, is_for_graph or not self._keeps_buffer
        if buffer is None or buffer.is_spoiled() or (must_look and buffer.is_kept(grads)):
            buffer = self._gradients = FlatGradients(self.plan, self._members, group)
        return buffer

    @torch.no_grad()
    def collect(
        self, reduction: Reduction, used: Sequence[bool] | None, held: Mapping[int, torch.Tensor]
    ) -> None:
        grads = grads_of(self._params)
        buffer = self._make_room(grads, reduction.group)
        # create_graph makes a new tensor where it adds to a gradient: then there is nothing to fill in place.
        self._held = {at: grad for at, grad in held.items() if grad is grads[at]}
        self.used = [grad is not None for grad in grads] if used is None else used
        self._untouched = {}
        if not all(self.used):
            self._untouched = {
                at: local_of(grad).clone()
                for at, (grad, shown) in enumerate(zip(grads, buffer.shown, strict=True))
                if grad is not None and grad is shown and not self.used[at]
            }
        if self._has_dtensors:
            grads = local_grads(self._members)
        buffer.fill(grads, reduction.scale)
        buffer.set_marks(self.used, reduction.mark(self.plan.dtype))
        self._exchange()

    def _exchange(self) -> None:
        """Put the views in the gradients' places at once: the memory of those is free for the next ones.

        Without that a backward asks the system for new pages for every gradient, which takes longer
        than the reduction.
        """
        try:
            if self._held or not all(self.used):
                for at, (param, shown) in enumerate(zip(self._params, self.gradients.shown, strict=True)):
                    if self.used[at] and at not in self._held:
                        param.grad = shown
            else:
                for param, shown in zip(self._params, self.gradients.shown, strict=True):
                    param.grad = shown
        except RuntimeError as error:
            raise self._explain(error) from error

    def renew(self) -> None:
        self._gradients = None

    def launch(self, reduction: Reduction) -> None:
        flat, group = self.gradients.flat, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, self.gradients.payload)
        else:
            self._pending = launch_plain(
                group, flat, lambda: comm.all_reduce(flat, group=group, feature=FEATURE, label=self._label)
            )

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> None:
        result = self._wait(reduction.group)
        if reduction.hook is not None and result is not None:
            self._take(result)
            return
        if has_imagined_peers(reduction.group):
            return
        total = self.gradients.sum_of_step_marks(reduction.group.size())
        if total is not None:
            reduction.check_step(total, self.plan.dtype)

    def _take(self, result: torch.Tensor) -> None:
        """What a hook brought, unless it is in the buffer already."""
        payload = self.gradients.payload
        is_alike = result.numel() * result.element_size() == payload.numel() * payload.element_size()
        if result.numel() != payload.numel() and not (is_alike and result.data_ptr() == payload.data_ptr()):
            raise StateError(
                f"a gradient hook brought {result.numel()} numbers for bucket {self._index}, which has "
                f"{payload.numel()}. Its future must bring a tensor of the size of bucket.buffer()."
            )
        is_here = result.data_ptr() == payload.data_ptr()
        if result.numel() and is_here and result.dtype != payload.dtype and result.numel() == payload.numel():
            result = result.clone()  # numbers of another size in the bucket's own memory
            is_here = False
        if result.numel() and not is_here:
            payload.copy_(result.view(-1))

    @torch.no_grad()
    def hand_out(self, used_anywhere: Sequence[bool] | None) -> Sequence[bool]:
        used = self.used
        if used_anywhere is not None:
            used = used_anywhere
        elif not all(used):
            used = self.gradients.used_anywhere()
        for at, grad in self._held.items():
            if used[at] and grad is self._params[at].grad:
                local_of(grad).copy_(self.gradients.views[at])
        if not all(self.used):
            self._hand_out_unused(used)
        self._untouched, self._held = {}, {}
        return used

    def _hand_out_unused(self, used: Sequence[bool]) -> None:
        """Give parameters that this rank has not used what the others made of them, or leave them alone."""
        for at, (param, shown) in enumerate(zip(self._params, self.gradients.shown, strict=True)):
            if self.used[at]:
                continue
            if not used[at]:
                if at in self._untouched:
                    self.gradients.views[at].copy_(self._untouched[at])
            elif at not in self._held:
                param.grad = shown

    def _explain(self, error: RuntimeError) -> Exception:
        """Name the parameter that has changed since the module was wrapped, if that is why."""
        for param, spec in ((local_of(member.param), member.spec) for member in self._members):
            if (param.dtype, tuple(param.shape), param.device) != (spec.dtype, spec.shape, spec.device):
                return StateError(
                    f"parameter '{spec.name}' has dtype {param.dtype}, shape {list(param.shape)} on "
                    f"{param.device}; when the module was wrapped it was {spec.dtype} of shape "
                    f"{list(spec.shape)} on {spec.device}. Change the module first and wrap it then."
                )
        return error

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return is_view_of_bucket(grad)
