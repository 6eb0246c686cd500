"""Reduce gradients while backward makes them.

Buckets go in plan order: one goes when all its gradients are there and the buckets
before it have gone; what is left goes when the backward ends. So ranks can't disagree
on the order, and a parameter without a gradient delays its bucket and breaks nothing.
After the first reduction the plan follows the order in which gradients came on the
group's first rank.

What lives how long: the plan and the buckets for good (until the plan changes), a Step for
one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from weft import comm
from weft.autograd import accumulation_node, current_backward, on_backward_end, will_run
from weft.comm.group import state_of
from weft.comm_hooks.bucket import GradHook
from weft.data_parallel.buckets import FEATURE, Bucket, DenseBucket, Member, Reduction, SparseBucket
from weft.data_parallel.plan import BucketCaps, BucketPlan, plan_buckets
from weft.data_parallel.times import StepTimes
from weft.errors import StateError


@dataclass(slots=True)
class Step:
    """One backward, from its first sign to its end."""

    is_synced: bool
    end: weakref.ref[Callable[[], None]]  # dead when the backward failed
    remaining: list[int]  # gradients to come, by bucket
    arrivals: list[int] = field(default_factory=list[int])  # parameters, in order
    counts: list[int] = field(default_factory=list[int])  # how often each came
    skipped: set[int] = field(default_factory=set[int])  # not in the graph, so not waited for
    held: list[dict[int, torch.Tensor]] = field(default_factory=list[dict[int, torch.Tensor]])
    num_launched: int = 0
    reduction: Reduction | None = None


class Reducer:
    """Reduces the gradients of some parameters over a group, backward by backward."""

    def __init__(
        self,
        members: Sequence[Member],
        group: ProcessGroup,
        caps: BucketCaps,
        *,
        keeps_buffers: bool = False,
        looks_for_unused: bool = False,
    ) -> None:
        self.members = members
        self.group = group
        self.caps = caps
        self.keeps_buffers = keeps_buffers
        self.looks_for_unused = looks_for_unused
        self.is_static = False
        self.hook: GradHook | None = None
        self.hook_state: Any = None
        self.find_divisor: Callable[[], int] = group.size
        self.after_settling: list[Callable[[], None]] = []
        self.num_steps = 0
        self.num_begun = 0  # reductions, those that failed included
        self.is_even = True  # every rank takes part with inputs of its own
        self.has_rebuilt = False
        self.times = StepTimes()
        self.order: list[int] = list(reversed(range(len(members))))
        self.plan: tuple[BucketPlan, ...] = ()
        self._buckets: list[Bucket] = []
        self._bucket_of: list[int] = []
        self._expected: list[int] = [1] * len(members)  # gradients of each parameter in a backward
        self._is_used = [False] * len(members)  # since the last reduction
        self._step: Step | None = None
        self._wants_sync = True
        self._nodes: list[Any] = []
        self._listeners: list[RemovableHandle] = []
        self._adopt(self.order)
        self.listen()

    @property
    def is_listening(self) -> bool:
        """Whether there is anything to do: a single rank without a hook reduces nothing."""
        return bool(self._listeners)

    def listen(self) -> None:
        """Hear of each gradient from now on, where there is something to do with it."""
        if not self._listeners and (self.group.size() > 1 or self.hook is not None):
            self._listeners = [
                member.param.register_post_accumulate_grad_hook(self._make_arrival(index))
                for index, member in enumerate(self.members)
            ]

    def stop_listening(self) -> None:
        """Hear of no gradient any more."""
        for listener in self._listeners:
            listener.remove()
        self._listeners = []

    def set_hook(self, hook: GradHook, state: Any) -> None:
        """Reduce each bucket with this hook."""
        self.hook, self.hook_state = hook, state
        self.listen()

    # The plan

    def _adopt(self, order: Sequence[int]) -> None:
        specs = [member.spec for member in self.members]
        self.order = list(order)
        self.plan = plan_buckets(specs, self.order, self.caps)
        self._buckets = [self._make_bucket(index, plan) for index, plan in enumerate(self.plan)]
        self._bucket_of = [0] * len(self.members)
        for number, plan in enumerate(self.plan):
            for index in plan.params:
                self._bucket_of[index] = number

    def _make_bucket(self, index: int, plan: BucketPlan) -> Bucket:
        members = [self.members[param] for param in plan.params]
        is_last = index == len(self.plan) - 1
        if plan.is_sparse:
            return SparseBucket(plan, members, index, is_last=is_last)
        return DenseBucket(plan, members, index, is_last=is_last, keeps_buffer=self.keeps_buffers)

    def _rebuild(self, arrivals: Sequence[int]) -> None:
        """Follow the first rank's order of arrival; what never came goes last."""
        self.has_rebuilt = True
        came = list(dict.fromkeys(arrivals))
        missing = sorted(set(self.order) - set(came), key=self.order.index)
        order = torch.tensor([*came, *missing], device=self._message_device())
        if self.group.size() > 1:
            first = state_of(self.group).ranks[0]
            comm.broadcast(order, first, self.group, feature=FEATURE).wait()
        self._adopt(order.tolist())

    def _message_device(self) -> torch.device:
        return self.members[0].spec.device

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with another group, from a plan of its own."""
        self.group = group
        self.find_divisor = group.size
        self.has_rebuilt = False
        self._step = None
        self._adopt(list(reversed(range(len(self.members)))))
        self.listen()

    # Backward begins

    def expect(self, *, is_synced: bool) -> None:
        """A forward has been made; its backward shall reduce, or not."""
        self.check_whole()
        self._wants_sync = is_synced

    def check_whole(self) -> None:
        """Notice a backward that failed and clear what it left. The next one tells if ranks are in step."""
        step = self._step
        if step is not None and step.end() is None:
            self._step = None
            for bucket in self._buckets:
                bucket.abandon()

    def begin(self, *, is_synced: bool) -> None:
        """A backward comes through a forward's outputs. Called at the gradient of each output."""
        if not self._listeners:
            return
        if self._step is not None and self._step.end() is not None:
            if is_synced and not self._step.is_synced:
                self._begin_reducing(self._step)
            return
        self.check_whole()
        self._open_step(is_synced=is_synced)

    def _open_step(self, *, is_synced: bool) -> Step:
        finish = self._make_end()
        step = self._step = Step(False, weakref.ref(finish), [])
        on_backward_end(finish)
        if is_synced:
            self._begin_reducing(step)
        return step

    def _make_end(self) -> Callable[[], None]:
        # A function of its own, so that only the backward holds it.
        def finish() -> None:
            self._end()

        return finish

    def _begin_reducing(self, step: Step) -> None:
        step.is_synced = True
        self.num_begun += 1
        self.times.backward_begins()
        step.remaining = [sum(self._expected[index] for index in plan.params) for plan in self.plan]
        step.counts = [0] * len(self.members)
        step.held = [self._find_held(bucket) for bucket in self._buckets]
        for index in step.arrivals:  # before it was known that this backward reduces
            step.counts[index] += 1
            step.remaining[self._bucket_of[index]] -= 1
        if self.looks_for_unused and not self.is_static:
            self._skip_unused(step)

    def _find_held(self, bucket: Bucket) -> dict[int, torch.Tensor]:
        """Gradients that were there before and are not ours: the user's memory, to be filled in place."""
        if self.keeps_buffers:
            return {}
        held: dict[int, torch.Tensor] = {}
        for at, index in enumerate(bucket.plan.params):
            grad = self.members[index].param.grad
            if grad is not None and not bucket.owns(at, grad):
                held[at] = grad
        return held

    def _skip_unused(self, step: Step) -> None:
        if not self._nodes:
            self._nodes = [accumulation_node(member.param) for member in self.members]
        for index, node in enumerate(self._nodes):
            if not step.counts[index] and not will_run(node):
                step.skipped.add(index)
                step.remaining[self._bucket_of[index]] -= 1
        if len(step.skipped) < len(self.members):
            self._launch_ready(step)

    # Gradients arrive

    def _make_arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        reducer = weakref.ref(self)

        def arrive(_: torch.Tensor) -> None:
            self = reducer()
            if self is not None:
                self._arrive(index)

        return arrive

    def _arrive(self, index: int) -> None:
        step = self._step
        if step is None or step.end() is None:
            # Nothing announced this backward: its loss was not made from the forward's outputs.
            if current_backward() is None:
                return
            self.check_whole()
            step = self._open_step(is_synced=self._wants_sync)
        self._is_used[index] = True
        step.arrivals.append(index)
        if not step.is_synced:
            return
        step.counts[index] += 1
        if step.counts[index] > self._expected[index] or index in step.skipped:
            self._check_repeated(step, index)
        number = self._bucket_of[index]
        step.remaining[number] -= 1
        if step.remaining[number] == 0 and number == step.num_launched:
            self._launch_ready(step)

    def _check_repeated(self, step: Step, index: int) -> None:
        if self.is_static and (not self.num_steps or self._bucket_of[index] >= step.num_launched):
            step.remaining[self._bucket_of[index]] += (
                1  # the first step counts; later ones may bring more in time
            )
            return
        name = self.members[index].spec.name
        if index in step.skipped:
            cause = (
                "find_unused_parameters=True took it for unused, since the graph of this backward didn't "
                "hold it: reentrant checkpointing hides what it recomputes. weft handles unused parameters "
                "without that flag"
            )
        else:
            cause = (
                "it got a gradient twice in one backward, as when a layer is used in two reentrant "
                "checkpoints, or backward ran through the module in parts"
            )
        raise StateError(
            f"rank {self._rank()}: Expected to mark a variable ready only once. Parameter '{name}': {cause}. "
            "Use torch.utils.checkpoint with use_reentrant=False, or static_graph=True if the graph is the "
            "same in every step."
        )

    def _launch_ready(self, step: Step) -> None:
        if self.is_static and not self.num_steps:
            return  # how often each parameter comes is known at the end of the first step
        while step.num_launched < len(self._buckets) and step.remaining[step.num_launched] == 0:
            self._launch(step)

    def _new_reduction(self) -> Reduction:
        divisor = self.find_divisor()
        return Reduction(self.group, divisor, self.num_begun, self.hook, self.hook_state, self.is_even)

    def _launch(self, step: Step) -> None:
        if step.reduction is None:
            self.times.communication_begins()
            step.reduction = self._new_reduction()
        bucket = self._buckets[step.num_launched]
        bucket.collect(step.reduction, [self._is_used[index] for index in bucket.plan.params])
        step.num_launched += 1
        bucket.launch(step.reduction)

    # Backward ends

    def _end(self) -> None:
        step = self._step
        if step is None:
            return
        if step.is_synced and (step.arrivals or any(self._is_used)):
            self.times.backward_ends()
            self._reduce_rest(step)
        self._step = None
        for callback in self.after_settling if step.is_synced else ():
            callback()

    def _reduce_rest(self, step: Step) -> None:
        while step.num_launched < len(self._buckets):
            self._launch(step)
        assert step.reduction is not None
        used_anywhere = self._agree_on_used(step.reduction) if self.hook is not None else None
        for bucket, held in zip(self._buckets, step.held, strict=True):
            used = None if used_anywhere is None else [used_anywhere[index] for index in bucket.plan.params]
            bucket.settle(step.reduction, held, used)
        self.times.communication_ends()
        if self.is_static and not self.num_steps:
            self._expected = [max(count, 1) for count in step.counts]
        self._is_used = [False] * len(self.members)
        self.num_steps += 1
        if not self.has_rebuilt:
            self._rebuild(step.arrivals)

    def _agree_on_used(self, reduction: Reduction) -> list[bool]:
        """Which parameters some rank has used. With a hook the buffers can't carry the marks."""
        if self.group.size() == 1:
            return list(self._is_used)
        own = [*self._is_used, reduction.mark()]
        marks = torch.tensor(own, dtype=torch.int32, device=self._message_device())
        *used, total = comm.all_reduce(marks, group=self.group, feature=FEATURE).wait().tolist()
        reduction.check_step(total)
        return [count > 0 for count in used]

    def _rank(self) -> int:
        return state_of(self.group).global_rank

    # Other ranks' steps

    def shadow(self) -> None:
        """Take part in a reduction of the others with nothing of one's own (uneven inputs)."""
        self.num_begun += 1
        reduction = self._new_reduction()
        for bucket in self._buckets:
            bucket.shadow(reduction)
        if self.hook is not None:
            self._agree_on_used(reduction)
        self.num_steps += 1
        if not self.has_rebuilt:
            self._rebuild([])
