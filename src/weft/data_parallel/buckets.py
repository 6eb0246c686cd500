"""Buckets of gradients: collect them in a buffer, start their reduction, assign the mean.

A step takes a bucket through `collect_grads`, `start`, `finish` and `assign_grads`, once each and in this
order. Dense gradients share one flat buffer and end up as views of it (`DenseBucket`, flat_gradients.py); the
sparse gradient of one parameter travels as entries (`SparseBucket`).

Invariant: all ranks make the same collectives in the same order. What they have to agree on beside the
gradients (the order of arrival, which parameters somebody used under a hook) goes in messages from here.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.call import hosted_by
from weft.comm.graph_capture import check_host_read, is_capturing
from weft.comm.group import has_imagined_peers, state_of
from weft.comm.record import stand_for
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.in_order import is_busy, launch_in_order
from weft.comm_hooks.mean import FEATURE, only_tensor
from weft.data_parallel.bucket_plan import BucketCaps, BucketPlan, follows, plan_buckets
from weft.data_parallel.flat_gradients import FlatGradients, check_flags_readable, is_view_of_bucket
from weft.data_parallel.parameters import DDPParam, local_grads_of
from weft.errors import DesyncError, InternalError, StateError
from weft.tensors import grads_of, local_of

Handle = comm.Handle[torch.Tensor]
Pending = Handle | Future[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one backward reduces: the same for all its buckets."""

    group: ProcessGroup
    divisor: int
    number: int  # counts the reducer's reductions
    reducer: int  # the id of the reducer in the group
    hook: GradHook | None = None
    hook_state: Any = None
    has_even_inputs: bool = True  # no rank has joined

    @property
    def scale(self) -> float:
        """The factor before the sum. A hook gets gradients as they are."""
        return 1.0 if self.hook is not None else 1.0 / self.divisor

    def mark(self, dtype: torch.dtype) -> int:
        """A number that differs from step to step; small where the dtype can't count far."""
        most = 7 if dtype.itemsize <= 2 else min(10007, 2**24 // self.group.size())
        return 1 + (31 * self.number + self.reducer) % most

    def check_step(self, total: float, dtype: torch.dtype) -> None:
        """Raise DesyncError if the sum of the ranks' marks shows one at another step or module."""
        if self.has_even_inputs and total != self.mark(dtype) * self.group.size():
            state = state_of(self.group)
            raise DesyncError(
                f"rank {state.global_rank}: the ranks of {state.words()} reduced gradients of different "
                f"steps, or of different modules: here it is reduction {self.number}. A rank has left out "
                "a backward, or gone on after one that failed, or ranks use modules in different order. "
                "Make every rank run the same backwards, or use weft.join for uneven inputs."
            )


class Bucket(ABC):
    """One bucket of the plan, and its reduction in flight."""

    def __init__(
        self, plan: BucketPlan, ddp_params: Sequence[DDPParam], index: int, *, is_last: bool
    ) -> None:
        self.plan = plan
        self._ddp_params = ddp_params
        self._index = index
        self._label = f"bucket {index}"
        self._is_last = is_last
        self._has_dtensors = any(ddp_param.dtensor_spec is not None for ddp_param in ddp_params)
        self.used: Sequence[bool] = ()  # on this rank, since the last reduction; set by collect_grads
        self._pending: Pending | None = None

    @abstractmethod
    def collect_grads(
        self, reduction: Reduction, used: Sequence[bool] | None, user_grads: Mapping[int, torch.Tensor]
    ) -> None:
        """Copy the parameters' gradients into the buffer.

        `used`: which of them this rank has used since the last reduction; None: all that have a gradient.
        `user_grads`, by place in the bucket, are the user's own tensors and stay where they are.
        """

    @abstractmethod
    def start(self, reduction: Reduction) -> None:
        """Start the reduction of what was collected."""

    @abstractmethod
    def finish(self, reduction: Reduction) -> None:
        """Wait for the mean."""

    @abstractmethod
    def assign_grads(self, used_globally: Sequence[bool] | None) -> Sequence[bool]:
        """Make the mean the parameters' gradients; returns which parameters have one now.

        It is copied into the user's own gradients. A parameter that no rank used is left as it was.
        """

    @abstractmethod
    def owns_grad(self, at: int, grad: torch.Tensor) -> bool:
        """Whether this gradient lies in the bucket's own memory."""

    @abstractmethod
    def release_buffer(self) -> None:
        """Drop memory that outlives the step: the next gradients get new memory."""

    def discard(self) -> None:
        """Wait for a reduction in flight and drop its result."""
        self._wait()

    def _wait(self, group: ProcessGroup | None = None) -> torch.Tensor | None:
        """The result of the reduction in flight, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if group is None or isinstance(pending, comm.Handle):
            return wait_for(pending)
        return stand_for(self._label, group, lambda: wait_for(pending))

    def _call_hook(self, reduction: Reduction, buffer: torch.Tensor) -> Future[torch.Tensor]:
        if self._has_dtensors:
            bucket = DTensorGradBucket(
                self._index, buffer, self._ddp_params, self.plan.offsets, is_last=self._is_last
            )
        else:
            params = [ddp_param.param for ddp_param in self._ddp_params]
            bucket = GradBucket(self._index, buffer, params, self.plan.offsets, is_last=self._is_last)
        return call_hook(reduction, bucket)


class DTensorGradBucket(GradBucket):
    """The bucket that a hook gets where parameters are DTensors: the buffer has their local gradients."""

    __slots__ = ("_ddp_params",)

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        ddp_params: Sequence[DDPParam],
        offsets: Sequence[int],
        *,
        is_last: bool,
    ) -> None:
        params = [local_of(ddp_param.param) for ddp_param in ddp_params]
        super().__init__(index, buffer, params, offsets, is_last=is_last)
        self._ddp_params = ddp_params

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, DTensors among them."""
        return [ddp_param.param for ddp_param in self._ddp_params]

    def gradients(self) -> list[torch.Tensor]:
        """Their gradients: views of the buffer, as DTensors where the parameters are."""
        views = super().gradients()
        return [ddp_param.as_grad(view) for ddp_param, view in zip(self._ddp_params, views, strict=True)]

    def _with(self, buffer: torch.Tensor, wanted: tuple[int, int] | None) -> GradBucket:
        return DTensorGradBucket(self._index, buffer, self._ddp_params, self._offsets, is_last=self._is_last)


def launch_behind_hooks(group: ProcessGroup, tensor: torch.Tensor, launch: Callable[[], Handle]) -> Pending:
    """Launch a collective, after the hooks that another module has under way on the group."""
    if is_busy(group):
        return launch_in_order(group, tensor, launch)
    return launch().followed()


def wait_for(pending: Pending) -> torch.Tensor:
    """The result of a collective or a hook."""
    if isinstance(pending, comm.Handle):
        return pending.wait()
    with hosted_by(FEATURE):  # callbacks of a future may run in the wait
        return only_tensor(pending.wait())


def call_hook(reduction: Reduction, bucket: GradBucket) -> Future[torch.Tensor]:
    """Call the hook and check what it returns."""
    assert reduction.hook is not None
    with hosted_by(FEATURE):
        future = cast("object", reduction.hook(reduction.hook_state, bucket))
    if not isinstance(future, torch._C.Future):  # which torch.futures.Future is, and what its `then` returns
        raise StateError(
            f"gradient hook {_name(reduction.hook)}: callback must return a torch.futures.Future object, "
            f"but got {type(future).__name__}. Return comm.all_reduce(...).future(), or a Future that is set."
        )
    return cast("Future[torch.Tensor]", future)


def _name(hook: GradHook) -> str:
    return getattr(hook, "__qualname__", str(hook))


class DenseBucket(Bucket):
    """Gradients in one flat buffer, which outlives the step."""

    def __init__(
        self,
        plan: BucketPlan,
        ddp_params: Sequence[DDPParam],
        index: int,
        *,
        is_last: bool,
        gradient_as_bucket_view: bool,
    ) -> None:
        super().__init__(plan, ddp_params, index, is_last=is_last)
        self._params = [ddp_param.param for ddp_param in ddp_params]
        self._gradient_as_bucket_view = gradient_as_bucket_view  # reuse the buffer whoever holds gradients
        self._gradients: FlatGradients | None = None
        self._unused_grads: dict[int, torch.Tensor] = {}  # put back if no rank has used the parameter
        self._user_grads: dict[int, torch.Tensor] = {}  # the user's own memory, which the mean is copied into
        self._traced_reduction: Reduction | None = None  # of a graph that makes gradients in the buffer
        self._in_place: set[int] = set()  # the gradients that it has made there

    @property
    def gradients(self) -> FlatGradients:
        """The buffer; there from the first step on."""
        if self._gradients is None:
            raise InternalError("a bucket was used before it had collected anything")
        return self._gradients

    @torch.no_grad()
    def collect_traced(self, reduction: Reduction, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy a compiled graph's gradients into the buffer, and return the buffer.

        Those that the graph has made there are left alone, whatever stands for them in the list.
        """
        buffer = self._begin_traced(reduction)
        self._user_grads, self._unused_grads, self.used = {}, {}, [True] * len(grads)
        buffer.fill(grads, reduction.scale, self._in_place)
        self._traced_reduction = None
        buffer.set_flags(self.used, reduction.mark(self.plan.dtype))
        return buffer.flat

    def destination(self, reduction: Reduction, at: int) -> tuple[torch.Tensor, float]:
        """The view in which a compiled graph makes a gradient, and the factor for it."""
        buffer = self._begin_traced(reduction)
        self._in_place.add(at)
        return buffer.destination(at, reduction.scale)

    def _begin_traced(self, reduction: Reduction) -> FlatGradients:
        if self._traced_reduction is not reduction:
            # Gradients that a graph returned before may lie in the buffer, and autograd adds to them later.
            self._ensure_buffer([None] * len(self._params), reduction.group, is_for_graph=True)
            self._traced_reduction, self._in_place = reduction, set()
        return self.gradients

    def _ensure_buffer(
        self, grads: Sequence[torch.Tensor | None], group: ProcessGroup, *, is_for_graph: bool = False
    ) -> FlatGradients:
        """The buffer, or a new one where the user holds gradients that lie in it."""
        buffer, checks_user = self._gradients, is_for_graph or not self._gradient_as_bucket_view
        if buffer is None or buffer.has_detached_views() or (checks_user and buffer.is_held_by_user(grads)):
            buffer = self._gradients = FlatGradients(self.plan, self._ddp_params, group)
        return buffer

    @torch.no_grad()
    def collect_grads(
        self, reduction: Reduction, used: Sequence[bool] | None, user_grads: Mapping[int, torch.Tensor]
    ) -> None:
        grads = grads_of(self._params)
        buffer = self._ensure_buffer(grads, reduction.group)
        # create_graph makes a new tensor where it adds to a gradient: then there is nothing to fill in place.
        self._user_grads = {at: grad for at, grad in user_grads.items() if grad is grads[at]}
        self.used = [grad is not None for grad in grads] if used is None else used
        self._unused_grads = {}
        if not all(self.used):
            self._unused_grads = {
                at: local_of(grad).clone()
                for at, (grad, grad_view) in enumerate(zip(grads, buffer.grad_views, strict=True))
                if grad is not None and grad is grad_view and not self.used[at]
            }
        if self._has_dtensors:
            grads = local_grads_of(self._ddp_params)
        buffer.fill(grads, reduction.scale)
        buffer.set_flags(self.used, reduction.mark(self.plan.dtype))
        self._swap_in_views()

    def _swap_in_views(self) -> None:
        """Make the views the gradients now, and so free the memory of those for the gradients to come.

        Otherwise a backward asks the system for new pages for every gradient, which takes longer than the
        reduction.
        """
        try:
            if self._user_grads or not all(self.used):
                for at, (param, grad_view) in enumerate(
                    zip(self._params, self.gradients.grad_views, strict=True)
                ):
                    if self.used[at] and at not in self._user_grads:
                        param.grad = grad_view
            else:
                for param, grad_view in zip(self._params, self.gradients.grad_views, strict=True):
                    param.grad = grad_view
        except RuntimeError as error:
            raise self._explain(error) from error

    def release_buffer(self) -> None:
        self._gradients = None

    def start(self, reduction: Reduction) -> None:
        flat, group = self.gradients.flat, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, self.gradients.payload)
        else:
            self._pending = launch_behind_hooks(
                group, flat, lambda: comm.all_reduce(flat, group=group, feature=FEATURE, label=self._label)
            )

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> None:
        result = self._wait(reduction.group)
        if reduction.hook is not None and result is not None:
            self._copy_hook_result(result)
            return
        if has_imagined_peers(reduction.group):
            return
        total = self.gradients.sum_of_step_marks(reduction.group.size())
        if total is not None:
            reduction.check_step(total, self.plan.dtype)

    def _copy_hook_result(self, result: torch.Tensor) -> None:
        """Copy a hook's result into the buffer, unless it is there already."""
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
    def assign_grads(self, used_globally: Sequence[bool] | None) -> Sequence[bool]:
        used = self.used
        if used_globally is not None:
            used = used_globally
        elif not all(used):
            used = self.gradients.used_globally()
        for at, grad in self._user_grads.items():
            if used[at] and grad is self._params[at].grad:
                local_of(grad).copy_(self.gradients.views[at])
        if not all(self.used):
            self._assign_unused(used)
        self._unused_grads, self._user_grads = {}, {}
        return used

    def _assign_unused(self, used: Sequence[bool]) -> None:
        """Parameters that only other ranks used get the mean; those that nobody used keep what they had."""
        for at, (param, grad_view) in enumerate(zip(self._params, self.gradients.grad_views, strict=True)):
            if self.used[at]:
                continue
            if not used[at]:
                if at in self._unused_grads:
                    self.gradients.views[at].copy_(self._unused_grads[at])
            elif at not in self._user_grads:
                param.grad = grad_view

    def _explain(self, error: RuntimeError) -> Exception:
        """An error that names the parameter that has changed since the module was wrapped, if one has."""
        for param, spec in ((local_of(ddp_param.param), ddp_param.spec) for ddp_param in self._ddp_params):
            if (param.dtype, tuple(param.shape), param.device) != (spec.dtype, spec.shape, spec.device):
                return StateError(
                    f"parameter '{spec.name}' has dtype {param.dtype}, shape {list(param.shape)} on "
                    f"{param.device}; when the module was wrapped it was {spec.dtype} of shape "
                    f"{list(spec.shape)} on {spec.device}. Change the module first and wrap it then."
                )
        return error

    def owns_grad(self, at: int, grad: torch.Tensor) -> bool:
        return is_view_of_bucket(grad)


class SparseBucket(Bucket):
    """One parameter with sparse gradients, which travel as entries."""

    def __init__(
        self, plan: BucketPlan, ddp_params: Sequence[DDPParam], index: int, *, is_last: bool
    ) -> None:
        super().__init__(plan, ddp_params, index, is_last=is_last)
        self._param = ddp_params[0].param
        self._grad = torch.empty(0)
        self._user_grads: torch.Tensor | None = None  # the user's own, which the mean is copied into

    @torch.no_grad()
    def collect_grads(
        self, reduction: Reduction, used: Sequence[bool] | None, user_grads: Mapping[int, torch.Tensor]
    ) -> None:
        grad = self._param.grad
        self.used = (grad is not None,) if used is None else used
        self._user_grads = user_grads.get(0)
        if grad is None:
            self._grad = empty_sparse(self._param)
        else:
            self._grad = (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce()

    def start(self, reduction: Reduction) -> None:
        grad, group = self._grad, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, grad)
        else:
            self._pending = launch_behind_hooks(
                group, grad, lambda: launch_sparse_mean(grad, reduction.divisor, group, self._label)
            )

    def finish(self, reduction: Reduction) -> None:
        mean = self._wait(reduction.group)
        if mean is None:
            raise InternalError("a sparse bucket was to finish before it was started")
        self._grad = mean

    @torch.no_grad()
    def assign_grads(self, used_globally: Sequence[bool] | None) -> Sequence[bool]:
        mean, self._grad = self._grad, torch.empty(0)
        is_used = self.used if used_globally is None else used_globally
        if not is_used[0] and mean.is_sparse and mean._nnz() == 0:
            return (False,)
        grad = self._param.grad
        if grad is not None and self._user_grads is grad:
            grad.copy_(mean if grad.is_sparse else mean.to_dense())
        else:
            self._param.grad = mean.to_dense() if grad is not None and not grad.is_sparse else mean
        return (True,)

    def release_buffer(self) -> None:
        """Nothing: it has no memory that outlives a step."""

    def owns_grad(self, at: int, grad: torch.Tensor) -> bool:
        return grad.is_sparse  # a new one in each step


def empty_sparse(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()


def launch_sparse_mean(
    grad: torch.Tensor, divisor: int, group: ProcessGroup, label: str = ""
) -> comm.Handle[torch.Tensor]:
    """Start the mean of a coalesced sparse tensor. Ranks may have different entries."""
    with torch.no_grad():
        part = grad / divisor
    return comm.all_reduce(part, group=group, feature=FEATURE, label=label)


class BucketSet:
    """The buckets in force, and the plan that they are built from.

    Rebuilt once, after the first reduction, by the order in which gradients arrived on the group's first
    rank. `plan` is a new object after each rebuild.
    """

    def __init__(
        self, ddp_params: Sequence[DDPParam], caps: BucketCaps, *, gradient_as_bucket_view: bool
    ) -> None:
        self._ddp_params = ddp_params
        self.caps = caps
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.is_greedy = False  # fill each bucket until its cap is reached
        self.reset()

    def reset(self) -> None:
        """Plan as before the first reduction."""
        self.is_rebuilt = False
        # Gradients arrive in about the reverse of the order in which parameters were made.
        self._build(list(reversed(range(len(self._ddp_params)))))

    def _build(self, order: Sequence[int]) -> None:
        ddp_params = self._ddp_params
        self.order = list(order)
        specs = [ddp_param.spec for ddp_param in ddp_params]
        self.plan: tuple[BucketPlan, ...] = plan_buckets(specs, order, self.caps, is_greedy=self.is_greedy)
        self.buckets: list[Bucket] = []
        self.bucket_of = [0] * len(ddp_params)  # by parameter
        self.ids = [frozenset(id(ddp_params[index].param) for index in plan.params) for plan in self.plan]
        for number, plan in enumerate(self.plan):
            is_last = number == len(self.plan) - 1
            inside = [ddp_params[index] for index in plan.params]
            if plan.is_sparse:
                self.buckets.append(SparseBucket(plan, inside, number, is_last=is_last))
            else:
                self.buckets.append(
                    DenseBucket(
                        plan,
                        inside,
                        number,
                        is_last=is_last,
                        gradient_as_bucket_view=self.gradient_as_bucket_view,
                    )
                )
            for index in plan.params:
                self.bucket_of[index] = number

    def resize(self, caps: BucketCaps, *, is_greedy: bool) -> None:
        """Go on with buckets of these sizes, as all ranks do."""
        if (caps, is_greedy) != (self.caps, self.is_greedy):
            self.caps, self.is_greedy = caps, is_greedy
            self._build(self.order)

    def rebuild_once(self, order: Sequence[int] | None, group: ProcessGroup, device: torch.device) -> None:
        """Rebuild after the first reduction, by the order of arrival on the group's first rank.

        All ranks call it. `None` keeps the order there is.
        """
        if not self.is_rebuilt:
            self.is_rebuilt = True
            self._build(agree_on_order(self.order if order is None else order, self.order, group, device))

    def rebuild_from_graph(self, order: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        """The same where a compiled graph has made the gradients, in this order.

        An order that the buckets follow well enough is not taken: the graph would be compiled again.
        """
        self.rebuild_once(None if follows(self.plan, order) else order, group, device)

    def release_buffers(self) -> None:
        """Let the next gradients have memory of their own, where buffers are kept otherwise."""
        for bucket in self.buckets if self.gradient_as_bucket_view else ():
            bucket.release_buffer()

    def count_expected(self, expected: Sequence[int]) -> list[int]:
        """How many gradients each bucket waits for, from how many each parameter gets."""
        return [sum(expected[index] for index in plan.params) for plan in self.plan]

    def find_user_grads(self, params: Sequence[torch.Tensor]) -> list[dict[int, torch.Tensor]]:
        """Gradients in the user's own memory, which the mean is copied into, by bucket and place in it."""
        user_grads: list[dict[int, torch.Tensor]] = [{} for _ in self.buckets]
        if self.gradient_as_bucket_view or {*map(type, grads_of(params))} == {type(None)}:
            return user_grads
        for bucket, found in zip(self.buckets, user_grads, strict=True):
            for at, index in enumerate(bucket.plan.params):
                grad = params[index].grad
                if grad is not None and not bucket.owns_grad(at, grad):
                    found[at] = grad
        return user_grads

    def find_used(self) -> list[bool]:
        """Whether this rank has used each parameter. Known when all buckets have collected."""
        used = [False] * len(self.bucket_of)
        for bucket in self.buckets:
            for index, is_used in zip(bucket.plan.params, bucket.used, strict=True):
                used[index] = is_used
        return used

    def find_last(self, arrivals: Sequence[int]) -> set[int]:
        """The parameter of each bucket that arrived last; any, where none has."""
        last = {number: plan.params[-1] for number, plan in enumerate(self.plan)}
        for index in arrivals:
            last[self.bucket_of[index]] = index
        return set(last.values())


_reducer_ids: weakref.WeakKeyDictionary[ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def reducer_ids(group: ProcessGroup) -> Iterator[int]:
    """Ids for the reducers of a group, in the order in which they are made."""
    return _reducer_ids.setdefault(group, itertools.count())


def agree_on_order(
    arrivals: Sequence[int], before: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """The first rank's order of arrival, on all ranks; what did not arrive there goes last, as before."""
    check_host_read(
        device,
        "the buckets of DDP or replicate are planned anew after the first step",
        "Make at least two steps before you capture one.",
    )
    arrived = list(dict.fromkeys(arrivals))
    missing = sorted(set(before) - set(arrived), key=list(before).index)
    order = torch.tensor([*arrived, *missing], device=device)
    if group.size() > 1:
        first = state_of(group).ranks[0]
        wait_for(
            launch_behind_hooks(
                group,
                order,
                lambda: comm.broadcast(order, first, group, feature=FEATURE, label="bucket order"),
            )
        )
    return order.tolist()


def agree_on_used(is_used: Sequence[bool], reduction: Reduction, device: torch.device) -> list[bool]:
    """Which parameters some rank has used. For hooks, whose buffers can't carry the flags."""
    group = reduction.group
    if group.size() == 1 or (all(is_used) and is_capturing(device)):
        return list(is_used)
    check_flags_readable(device)
    own = [*is_used, reduction.mark(torch.int32)]
    flags = torch.tensor(own, dtype=torch.int32, device=device)
    pending = launch_behind_hooks(
        group, flags, lambda: comm.all_reduce(flags, group=group, feature=FEATURE, label="used parameters")
    )
    *used, total = wait_for(pending).tolist()
    reduction.check_step(total, torch.int32)
    return [count > 0 for count in used]
