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
from weft.data_parallel.arrivals import Listener
from weft.data_parallel.bucket_set import BucketSet, agree_on_order, agree_on_used
from weft.data_parallel.buckets import Member, Reduction
from weft.data_parallel.plan import BucketCaps
from weft.data_parallel.refusals import came_after_failure, came_twice, came_unannounced, is_shared
from weft.data_parallel.step import Step
from weft.data_parallel.times import StepTimes
from weft.data_parallel.user_hooks import defer_hooks, hooks_of, is_reduced_elsewhere, run_deferred
from weft.tensors import grads_of


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
        self.on_unused: Callable[[], None] | None = None  # may raise
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
        self._wants_sync = True  # at the last forward
        self._is_expecting = False  # a backward, since a forward was made
        self._knows_counts = False  # of gradients, which a static graph promises
        self._nodes: list[Any] = []
        self._params = [member.param for member in members]
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self._listener = Listener(self._params, self._look)
        self._hook_dicts: list[dict[int, Any]] = []
        self.listen()

    @property
    def is_listening(self) -> bool:
        """Whether there is anything to do: a single rank without a hook reduces nothing."""
        return self._listener.is_on

    def listen(self) -> None:
        """Hear of each gradient from now on, where there is something to do with it."""
        if self.group.size() > 1 or self.hook is not None:
            self._listener.listen(range(len(self.members)))
            self._hook_dicts = [hooks_of(param) for param in self._params]

    def stop_listening(self) -> None:
        """Hear of no gradient any more."""
        self._listener.stop()

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
        self._is_expecting = True

    def check_whole(self) -> None:
        """Notice a backward that failed and clear what it left. The next one tells if ranks are in step."""
        step = self._step
        if step is not None and step.has_failed():
            self._step = None
            self._listener.arrived.clear()
            for bucket in self.buckets.buckets:
                bucket.abandon()
        if step is None and self._listener.arrived and current_backward() is None:
            self._listener.arrived.clear()
            if self._is_expecting:
                self._is_expecting = False
                self._listener.listen(range(len(self.members)))
                raise came_unannounced(self._rank())

    def begin(self, *, is_synced: bool) -> None:
        """A backward comes through a forward's outputs. Called at the gradient of each output."""
        if not self._listener.is_on:
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
        step.held = self._find_held()
        if sum(map(len, self._hook_dicts)) > len(self.members):  # there are hooks beside ours
            myself = weakref.ref(self)
            step.deferred = {index for index, param in enumerate(self._params) if defer_hooks(param, myself)}
            self._check_alone()
        if self.looks_for_unused and not self.is_static and current_backward() is not None:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                self._skip_unused(step)

    def _check_alone(self) -> None:
        for member in self.members:
            if is_reduced_elsewhere(member.param, self):
                raise is_shared(self._rank(), member.spec.name)

    def _find_held(self) -> list[dict[int, torch.Tensor]]:
        """Gradients that were there before and are not ours: the user's memory, to be filled in place."""
        held: list[dict[int, torch.Tensor]] = [{} for _ in self.buckets.buckets]
        if self.keeps_buffers or {*map(type, grads_of(self._params))} == {type(None)}:
            return held
        for bucket, found in zip(self.buckets.buckets, held, strict=True):
            for at, index in enumerate(bucket.plan.params):
                grad = self._params[index].grad
                if grad is not None and not bucket.owns(at, grad):
                    found[at] = grad
        return held

    def _skip_unused(self, step: Step) -> None:
        for index, node in enumerate(self._accumulation_nodes()):
            if not step.counts[index] and not will_run(node):
                step.skipped.add(index)
                step.remaining[self.buckets.bucket_of[index]] -= 1
        if len(step.skipped) < len(self.members):
            self._launch_ready(step)

    def is_reducing(self) -> bool:
        """Whether a backward goes on whose gradients are reduced."""
        return self._step is not None and self._step.is_synced

    def _accumulation_nodes(self) -> list[Any]:
        if not self._nodes:
            self._nodes = [accumulation_node(member.param) for member in self.members]
        return self._nodes

    # Gradients arrive

    def _look(self) -> None:
        """Gradients have come: launch what is full."""
        step = self._step
        if step is not None and step.has_failed():
            self.check_whole()
            raise came_after_failure(self._rank())
        if step is None:
            # Nothing announced this backward: its loss was not made from the forward's outputs.
            if not self._is_expecting:  # nor has there been a forward: it is another module's
                self._listener.arrived.clear()
                return
            step = self._open_step(is_synced=self._wants_sync)
        if step.is_synced:
            step.streams.note(self._listener.arrived[-1])
            self._launch_full(step)
            self._count_arrivals(step)
            self._launch_ready(step)

    def _launch_full(self, step: Step) -> None:
        """Launch buckets that came whole, one after the other: the usual case, seen without counting."""
        arrived = self._listener.arrived
        if self.is_static or step.skipped:
            return
        while step.num_launched < len(self.buckets.buckets):
            ids = self.buckets.ids[step.num_launched]
            come = arrived[step.num_seen : step.num_seen + len(ids)]
            is_fresh = step.remaining[step.num_launched] == len(ids) == len(come)
            if not is_fresh or not ids.issubset(map(id, come)):
                return
            step.num_seen += len(ids)
            step.remaining[step.num_launched] = 0
            self._launch(step, has_all=True)

    def _count_arrivals(self, step: Step) -> None:
        """Take stock of gradients one by one."""
        arrived = self._listener.arrived
        while step.num_seen < len(arrived):
            param = arrived[step.num_seen]
            step.num_seen += 1
            index = self._index_of[id(param)]
            self._is_used[index] |= param.grad is not None
            step.counts[index] += 1
            number = self.buckets.bucket_of[index]
            is_late = number < step.num_launched
            if is_late or step.counts[index] > self._expected[index] or index in step.skipped:
                self._check_repeated(step, index)
            step.remaining[number] -= 1

    def _check_repeated(self, step: Step, index: int) -> None:
        number = self.buckets.bucket_of[index]
        if self.is_static and number >= step.num_launched:
            step.remaining[number] += 1  # one more than in the first step, but in time
            return
        raise came_twice(self._rank(), self.members[index].spec.name, is_skipped=index in step.skipped)

    def _launch_ready(self, step: Step) -> None:
        if self.is_static and not self._knows_counts:
            return  # how often each parameter comes is known at the end of the first step
        while step.num_launched < len(self.buckets.buckets) and step.remaining[step.num_launched] == 0:
            self._launch(step)

    def _new_reduction(self) -> Reduction:
        divisor = self.find_divisor()
        return Reduction(self.group, divisor, self.num_begun, self.hook, self.hook_state, self.is_even)

    def _launch(self, step: Step, *, has_all: bool = False) -> None:
        if step.reduction is None:
            self.times.communication_begins()
            step.reduction = self._new_reduction()
        bucket = self.buckets.buckets[step.num_launched]
        used = None if has_all else [self._is_used[index] for index in bucket.plan.params]
        with step.streams.joined(bucket.plan.device):
            bucket.collect(step.reduction, used, step.held[step.num_launched])
        step.num_launched += 1
        bucket.launch(step.reduction)

    # Backward ends

    def _end(self) -> None:
        step = self._step
        if step is None:
            return
        if not step.is_synced:
            for param in self._listener.arrived:
                self._is_used[self._index_of[id(param)]] |= param.grad is not None
        elif self._is_for_parameters(step):
            self.times.backward_ends()
            step.num_early = step.num_launched
            self._count_arrivals(step)
            self._reduce_rest(step)
        self._step = None
        self._is_expecting = False
        self._listener.arrived.clear()

    def _is_for_parameters(self, step: Step) -> bool:
        """Not where `torch.autograd.grad` asked for other gradients: then the graph has parameters, unused.

        A rank that has used none of them at all takes part, for those that have.
        """
        if self._listener.arrived or any(self._is_used):
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
            used_anywhere = agree_on_used(self._used(), step.reduction, self._message_device())
        for bucket, held in zip(self.buckets.buckets, step.held, strict=True):
            used = None if used_anywhere is None else [used_anywhere[index] for index in bucket.plan.params]
            has_grad = bucket.hand_out(held, used)
            for index, has_one in zip(bucket.plan.params if step.deferred else (), has_grad, strict=False):
                if has_one and index in step.deferred:
                    has_stepped = getattr(self.hook, "steps_optimizers", False)
                    run_deferred(self._params[index], has_stepped=has_stepped)
        self.times.communication_ends()
        if self.is_static and not self._knows_counts and any(step.counts):
            self._expected, self._knows_counts = list(step.counts), True
        if self.on_unused is not None and not all(all(bucket.used) for bucket in self.buckets.buckets):
            self.on_unused()
        self._is_used = [False] * len(self.members)
        self.num_steps += 1
        self._learn_order(step)

    def _used(self) -> list[bool]:
        used = [False] * len(self.members)
        for bucket in self.buckets.buckets:
            for index, is_used in zip(bucket.plan.params, bucket.used, strict=True):
                used[index] = is_used
        return used

    def _learn_order(self, step: Step) -> None:
        """Plan for the order in which gradients came, and listen to the last of each bucket."""
        is_new = not self.has_rebuilt
        arrivals = [self._index_of[id(param)] for param in self._listener.arrived] if is_new else []
        if is_new:
            self.has_rebuilt = True
            device = self._message_device()
            self._adopt(agree_on_order(arrivals, self.buckets.order, self.group, device))
        elif step.num_early < len(self.buckets.buckets):
            arrivals = [self._index_of[id(param)] for param in self._listener.arrived]
        if step.streams.are_several:
            self._listener.listen(range(len(self.members)))  # each must say on which it comes
        # A backward that nothing announces can be noticed by any parameter: then all must call.
        elif step.roots and arrivals:
            self._listener.listen(self.buckets.find_last(arrivals))

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
