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
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from weft.autograd import (
    accumulation_node,
    current_backward,
    current_node,
    is_reachable,
    on_backward_end,
    will_run,
)
from weft.comm.group import state_of
from weft.comm_hooks.bucket import GradHook
from weft.data_parallel.bucket_set import BucketSet, agree_on_order, agree_on_used
from weft.data_parallel.buckets import Bucket, Member, Reduction
from weft.data_parallel.plan import BucketCaps
from weft.data_parallel.step import Step
from weft.data_parallel.times import StepTimes
from weft.data_parallel.user_hooks import as_listener, defer_hooks, run_deferred
from weft.errors import StateError


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
        # Gradients come in about the reverse of the order in which parameters were made.
        self._adopt(list(reversed(range(len(members)))))
        self._expected: list[int] = [1] * len(members)  # gradients of each parameter in a backward
        self._is_used = [False] * len(members)  # since the last reduction
        self._step: Step | None = None
        self._wants_sync = True
        self._nodes: list[Any] = []
        self._listeners: list[RemovableHandle] = []
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

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with another group, from a plan of its own."""
        self.group = group
        self.find_divisor = group.size
        self.has_rebuilt = False
        self._step = None
        self._adopt(list(reversed(range(len(self.members)))))
        self.listen()

    def _adopt(self, order: Sequence[int]) -> None:
        self.buckets = BucketSet(self.members, order, self.caps, keeps_buffers=self.keeps_buffers)

    def _message_device(self) -> torch.device:
        return self.members[0].spec.device

    # Backward begins

    def expect(self, *, is_synced: bool) -> None:
        """A forward has been made; its backward shall reduce, or not."""
        self.check_whole()
        self._wants_sync = is_synced

    def check_whole(self) -> None:
        """Notice a backward that failed and clear what it left. The next one tells if ranks are in step."""
        step = self._step
        if step is not None and step.has_failed():
            self._step = None
            for bucket in self.buckets.buckets:
                bucket.abandon()

    def begin(self, *, is_synced: bool) -> None:
        """A backward comes through a forward's outputs. Called at the gradient of each output."""
        if not self._listeners:
            return
        step = self._step
        if step is None or step.has_failed():
            self.check_whole()
            step = self._open_step(is_synced=is_synced)
        elif is_synced and not step.is_synced:
            self._begin_reducing(step)
        step.roots.append(current_node())

    def _open_step(self, *, is_synced: bool) -> Step:
        finish = self._make_end()
        step = self._step = Step(weakref.ref(finish))
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
        step.remaining = self.buckets.count_expected(self._expected)
        step.counts = [0] * len(self.members)
        step.held = [self._find_held(bucket) for bucket in self.buckets.buckets]
        step.deferred = {
            index for index, member in enumerate(self.members) if defer_hooks(member.param, self._is_reducing)
        }
        for index in step.arrivals:  # before it was known that this backward reduces
            step.counts[index] += 1
            step.remaining[self.buckets.bucket_of[index]] -= 1
        if self.looks_for_unused and not self.is_static and current_backward() is not None:
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
        for index, node in enumerate(self._accumulation_nodes()):
            if not step.counts[index] and not will_run(node):
                step.skipped.add(index)
                step.remaining[self.buckets.bucket_of[index]] -= 1
        if len(step.skipped) < len(self.members):
            self._launch_ready(step)

    def _is_reducing(self) -> bool:
        return self._step is not None and self._step.is_synced

    def _accumulation_nodes(self) -> list[Any]:
        if not self._nodes:
            self._nodes = [accumulation_node(member.param) for member in self.members]
        return self._nodes

    # Gradients arrive

    def _make_arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        reducer = weakref.ref(self)

        def arrive(_: torch.Tensor) -> None:
            self = reducer()
            if self is not None:
                self._arrive(index)

        return as_listener(arrive)

    def _arrive(self, index: int) -> None:
        step = self._step
        if step is None or step.has_failed():
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
        number = self.buckets.bucket_of[index]
        step.remaining[number] -= 1
        if step.remaining[number] == 0 and number == step.num_launched:
            self._launch_ready(step)

    def _check_repeated(self, step: Step, index: int) -> None:
        if self.is_static and (not self.num_steps or self.buckets.bucket_of[index] >= step.num_launched):
            step.remaining[self.buckets.bucket_of[index]] += (
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
        while step.num_launched < len(self.buckets.buckets) and step.remaining[step.num_launched] == 0:
            self._launch(step)

    def _new_reduction(self) -> Reduction:
        divisor = self.find_divisor()
        return Reduction(self.group, divisor, self.num_begun, self.hook, self.hook_state, self.is_even)

    def _launch(self, step: Step) -> None:
        if step.reduction is None:
            self.times.communication_begins()
            step.reduction = self._new_reduction()
        bucket = self.buckets.buckets[step.num_launched]
        bucket.collect(step.reduction, [self._is_used[index] for index in bucket.plan.params])
        step.num_launched += 1
        bucket.launch(step.reduction)

    # Backward ends

    def _end(self) -> None:
        step = self._step
        if step is None:
            return
        if step.is_synced and self._is_for_parameters(step):
            self.times.backward_ends()
            self._reduce_rest(step)
        self._step = None
        if step.is_synced:
            self._tell_settled()

    def _tell_settled(self) -> None:
        for callback in self.after_settling:
            callback()

    def _is_for_parameters(self, step: Step) -> bool:
        """Not where `torch.autograd.grad` asked for other gradients: then the graph has parameters, unused.

        A rank that has used none of them at all takes part, for those that have.
        """
        if step.arrivals or any(self._is_used):
            return True
        return not is_reachable(step.roots, self._accumulation_nodes())

    def _reduce_rest(self, step: Step) -> None:
        while step.num_launched < len(self.buckets.buckets):
            self._launch(step)
        assert step.reduction is not None
        for bucket in self.buckets.buckets:
            bucket.finish(step.reduction)
        used_anywhere = None
        if self.hook is not None:
            used_anywhere = agree_on_used(self._is_used, step.reduction, self._message_device())
        for bucket, held in zip(self.buckets.buckets, step.held, strict=True):
            used = None if used_anywhere is None else [used_anywhere[index] for index in bucket.plan.params]
            has_grad = bucket.hand_out(held, used)
            for index, has_one in zip(bucket.plan.params if step.deferred else (), has_grad, strict=False):
                if has_one and index in step.deferred:
                    run_deferred(self.members[index].param)
        self.times.communication_ends()
        if self.is_static and not self.num_steps:
            self._expected = [max(count, 1) for count in step.counts]
        self._is_used = [False] * len(self.members)
        self.num_steps += 1
        if not self.has_rebuilt:
            self.has_rebuilt = True
            device = self._message_device()
            self._adopt(agree_on_order(step.arrivals, self.buckets.order, self.group, device))

    def _rank(self) -> int:
        return state_of(self.group).global_rank

    # Other ranks' steps

    def shadow(self) -> None:
        """Take part in a reduction of the others with no gradients of one's own (uneven inputs).

        The parameters get the others' mean, so that an optimizer which shares its work among all
        ranks finds the same gradients on each.
        """
        for member in self.members:
            member.param.grad = None
        step = Step()
        self._begin_reducing(step)
        self._reduce_rest(step)
        self._tell_settled()
