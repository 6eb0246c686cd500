"""The buckets of a plan at work: collect gradients, launch their reduction, hand the mean out.

A step takes a bucket through `collect`, `launch`, `finish` and `hand_out`, once each and in this
order. What a bucket is made of is dense.py's and sparse.py's to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import state_of
from weft.comm.record import stand_for
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.in_order import is_busy, launch_in_order
from weft.comm_hooks.mean import only_tensor
from weft.data_parallel.members import Member
from weft.data_parallel.plan import BucketPlan
from weft.errors import DesyncError, StateError
from weft.tensors import local_of

Handle = comm.Handle[torch.Tensor]
Pending = Handle | Future[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How this step reduces: the same for all its buckets."""

    group: ProcessGroup
    divisor: int
    number: int  # of the reductions begun so far
    reducer: int  # the number of its reducer among those of the process
    hook: GradHook | None = None
    hook_state: Any = None
    is_even: bool = True  # no rank takes part without inputs of its own

    @property
    def scale(self) -> float:
        """What gradients are multiplied by before they are summed: a hook gets them as they are."""
        return 1.0 if self.hook is not None else 1.0 / self.divisor

    def mark(self, dtype: torch.dtype) -> int:
        """A number that tells this reduction from others; small where the dtype can't count far."""
        most = 7 if dtype.itemsize <= 2 else min(10007, 2**24 // self.group.size())
        return 1 + (31 * self.number + self.reducer) % most

    def check_step(self, total: float, dtype: torch.dtype) -> None:
        """Raise if the ranks' marks don't add up: somebody is at another step, or at another module."""
        if self.is_even and total != self.mark(dtype) * self.group.size():
            state = state_of(self.group)
            raise DesyncError(
                f"rank {state.global_rank}: the ranks of {state.words()} reduced gradients of different "
                f"steps, or of different modules: here it is reduction {self.number}. A rank has left out "
                "a backward, or gone on after one that failed, or ranks use modules in different order. "
                "Make every rank run the same backwards, or use weft.join for uneven inputs."
            )


class Bucket(ABC):
    """One bucket of the plan. `Pending` is what its last launch is waited for with."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool) -> None:
        self.plan = plan
        self._members = members
        self._index = index
        self._label = f"bucket {index}"
        self._is_last = is_last
        self._has_dtensors = any(member.whole is not None for member in members)
        self.used: Sequence[bool] = ()  # by this rank, since the last reduction; known when it has collected
        self._pending: Pending | None = None

    @abstractmethod
    def collect(
        self, reduction: Reduction, used: Sequence[bool] | None, held: Mapping[int, torch.Tensor]
    ) -> None:
        """Bring the gradients that are there into the buffer.

        `used` says which came since the last reduction; None: all that are there. Gradients in `held`,
        by place in the bucket, were the user's before and stay where they are.
        """

    @abstractmethod
    def launch(self, reduction: Reduction) -> None:
        """Start the reduction of what was collected."""

    @abstractmethod
    def finish(self, reduction: Reduction) -> None:
        """Wait for the mean. Until all buckets have finished, hooks may use the group."""

    @abstractmethod
    def hand_out(self, used_anywhere: Sequence[bool] | None) -> Sequence[bool]:
        """Make the mean the parameters' gradients; say which have one now.

        It is copied into those that were held. A parameter that no rank used is left as it was.
        """

    @abstractmethod
    def owns(self, at: int, grad: torch.Tensor) -> bool:
        """Whether this gradient lies in the bucket's own memory."""

    @abstractmethod
    def renew(self) -> None:
        """Let go of memory that outlives the step: the next gradients get memory of their own."""

    def abandon(self) -> None:
        """Wait for what was launched, if anything, and forget it."""
        self._wait()

    def _wait(self, group: ProcessGroup | None = None) -> torch.Tensor | None:
        """What the reduction brought, if one was launched."""
        pending, self._pending = self._pending, None
        if pending is None or group is None or isinstance(pending, comm.Handle):
            return None if pending is None else wait_for(pending)
        return stand_for(self._label, group, lambda: wait_for(pending))

    def _call_hook(self, reduction: Reduction, buffer: torch.Tensor) -> Future[torch.Tensor]:
        if self._has_dtensors:
            bucket = PlacedBucket(
                self._index, buffer, self._members, self.plan.offsets, is_last=self._is_last
            )
        else:
            params = [member.param for member in self._members]
            bucket = GradBucket(self._index, buffer, params, self.plan.offsets, is_last=self._is_last)
        return call_hook(reduction, bucket)


class PlacedBucket(GradBucket):
    """What a hook is given where parameters are DTensors: the buffer has their local gradients."""

    __slots__ = ("_members",)

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        members: Sequence[Member],
        offsets: Sequence[int],
        *,
        is_last: bool,
    ) -> None:
        params = [local_of(member.param) for member in members]
        super().__init__(index, buffer, params, offsets, is_last=is_last)
        self._members = members

    def parameters(self) -> list[torch.Tensor]:
        """The parameters as users know them."""
        return [member.param for member in self._members]

    def gradients(self) -> list[torch.Tensor]:
        """Their gradients: views of the buffer, those of DTensors inside a DTensor."""
        views = super().gradients()
        return [member.shown(view) for member, view in zip(self._members, views, strict=True)]

    def _with(self, buffer: torch.Tensor, wanted: tuple[int, int] | None) -> GradBucket:
        return PlacedBucket(self._index, buffer, self._members, self._offsets, is_last=self._is_last)


def launch_plain(group: ProcessGroup, tensor: torch.Tensor, launch: Callable[[], Handle]) -> Pending:
    """Launch a collective behind the hooks that another module has under way on the group."""
    if is_busy(group):
        return launch_in_order(group, tensor, launch)
    return launch().followed()


def wait_for(pending: Pending) -> torch.Tensor:
    """What a launched collective, or a hook, brings."""
    return pending.wait() if isinstance(pending, comm.Handle) else only_tensor(pending.wait())


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


def _name(hook: GradHook) -> str:
    return getattr(hook, "__qualname__", str(hook))
