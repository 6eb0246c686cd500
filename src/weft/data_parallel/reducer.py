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

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from weft.autograd import announce_gradients, current_backward, current_node, on_backward_end
from weft.comm.group import state_of
from weft.comm_hooks.bucket import GradHook
from weft.data_parallel.arrivals import Listener
from weft.data_parallel.bucket_plans import BucketPlans
from weft.data_parallel.bucket_set import BucketSet, agree_on_used, numbers_of
from weft.data_parallel.buckets import Reduction
from weft.data_parallel.members import Member, settle
from weft.data_parallel.parameter_nodes import ParameterNodes
from weft.data_parallel.plan import BucketCaps
from weft.data_parallel.refusals import (
    came_after_failure,
    came_twice,
    came_unannounced,
    is_shared,
    unexpected_words,
)
from weft.data_parallel.step import Expectation, Step, one_at_a_time
from weft.data_parallel.times import StepTimes
from weft.data_parallel.user_hooks import (
    defer_all,
    defer_hooks,
    hooks_of,
    is_heard_elsewhere,
    is_reduced_elsewhere,
    run_deferred,
)


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
        self.plans = BucketPlans(members, caps, keeps_buffers=keeps_buffers)
        self.looks_for_unused = looks_for_unused
        self.is_static = False
        self.hook: GradHook | None = None
        self.hook_state: Any = None
        self.find_divisor: Callable[[], int] = group.size
        self.on_unused: Callable[[], None] | None = None  # may raise
        self.num_steps = 0
        self.num_begun = 0  # reductions, those that failed included
        self.is_even = True  # every rank takes part with inputs of its own
        self.times = StepTimes()
        self._expected: list[int] = [1] * len(members)  # gradients of each parameter in a backward
        self._is_used = [False] * len(members)  # since the last reduction
        self._message_device = members[0].spec.device
        self._number = next(numbers_of(group))  # which ranks agree on if they make modules in one order
        self._mutex = threading.RLock()
        self._step: Step | None = None
        self.expected = Expectation()
        self._has_warned = False  # of one without a forward
        self._knows_counts = False  # of gradients, which a static graph promises
        self._params = [member.param for member in members]
        self._nodes = ParameterNodes(self._params)
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self._placed = {id(member.param): member for member in members if member.whole is not None}
        self.listener = Listener(self._params, self._look, self._settle if self._placed else None)
        self._hook_dicts: list[dict[int, Any]] = []
        self.listen()

    @property
    def buckets(self) -> BucketSet:
        """The buckets of the plan in force."""
        return self.plans.buckets

    @property
    def is_listening(self) -> bool:
        """Whether there is anything to do: a single rank with neither a hook nor DTensors reduces nothing."""
        return self.listener.is_on

    def listen(self) -> None:
        """Hear of each gradient from now on, where there is something to do with it."""
        if self.group.size() > 1 or self.hook is not None or self._placed:
            self.listener.listen(range(len(self.members)))
            self._hook_dicts = [hooks_of(param) for param in self._params]
            for param in self._params:  # so that none runs before the first backward is noticed
                defer_hooks(param, weakref.ref(self))

    def set_hook(self, hook: GradHook, state: Any) -> None:
        """Reduce each bucket with this hook."""
        self.hook, self.hook_state = hook, state
        self.listen()

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with another group, from a plan of its own."""
        self.group = group
        self.find_divisor = group.size
        self.num_begun = 0
        self._number = next(numbers_of(group))
        self._step = None
        self.plans.start_over()
        self.listen()

    def expect(self, *, is_synced: bool) -> None:
        """A forward has been made; its backward shall reduce, or not."""
        self.check_whole()
        self.expected.is_synced = is_synced
        self.expected.is_open, self.expected.is_traced = True, False

    def check_whole(self) -> None:
        """Notice a backward that failed and clear what it left. The next one tells if ranks are in step."""
        step = self._step
        if step is not None and step.has_failed():
            self._step = None
            self.listener.arrived.clear()
            for bucket in self.buckets.buckets:
                bucket.abandon()
        if step is None and self.listener.arrived and current_backward() is None:
            self.listener.arrived.clear()
            if self.expected.is_open:
                self.expected.is_open = False
                self.listener.listen(range(len(self.members)))
                raise came_unannounced(self._rank())

    @one_at_a_time
    def begin(self, *, is_synced: bool) -> None:
        """A backward comes through a forward's outputs. Called at the gradient of each output."""
        if not self.listener.is_on:
            return
        step = self._step
        if step is None or step.has_failed():
            self.check_whole()
            step = self._open_step(is_synced=is_synced)
        elif is_synced and not step.is_synced:
            self._begin_reducing(step)
        step.is_unexpected = False
        step.roots.append(current_node())

    def _open_step(self, *, is_synced: bool) -> Step:
        finish = functools.partial(self._end)  # of its own, so that only the backward holds it
        step = self._step = Step(weakref.ref(finish), current_backward())
        on_backward_end(finish)
        announce_gradients(self._params, renew=self.plans.renew)
        if is_synced:
            self._begin_reducing(step)
        return step

    def _begin_reducing(self, step: Step) -> None:
        if self._is_done_elsewhere():
            return
        step.is_synced = True
        self.num_begun += 1
        self.times.backward_begins()
        step.remaining = self.buckets.count_expected(self._expected)
        step.counts = [0] * len(self.members)
        settle(self._placed, self.listener.arrived)  # before this backward was known to reduce
        step.held = self.buckets.find_held(self._params, is_filled=not self.plans.keeps_buffers)
        if sum(map(len, self._hook_dicts)) > len(self.members):  # there are hooks beside ours
            arriving = self.listener.arrived[-1:] if not step.roots else ()
            step.deferred = defer_all(self._params, weakref.ref(self), arriving)
        if self.looks_for_unused and not self.is_static and current_backward() is not None:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                self._skip_unused(step)

    def _is_done_elsewhere(self) -> bool:
        """Whether another module, inside this one or around it, reduces all of these gradients already."""
        if sum(map(len, self._hook_dicts)) == len(self.members):  # there are no hooks beside ours
            return False
        shared = [member for member in self.members if is_reduced_elsewhere(member.param, self)]
        if shared and len(shared) < len(self.members):
            raise is_shared(self._rank(), shared[0].spec.name)
        return bool(shared)

    def _skip_unused(self, step: Step) -> None:
        unused = self._nodes.find_unused()
        settle(self._placed, (self._params[index] for index in unused))  # what they got without sync
        for index in unused:
            step.skipped.add(index)
            step.remaining[self.buckets.bucket_of[index]] -= 1
        if len(step.skipped) < len(self.members):
            self._launch_ready(step)

    def is_reducing(self) -> bool:
        """Whether a backward goes on whose gradients are reduced."""
        return self._step is not None and self._step.is_synced

    @one_at_a_time
    def _look(self) -> None:
        """Gradients have come: launch what is full."""
        step = self._step
        if step is not None and step.has_failed():
            self.check_whole()
            raise came_after_failure(self._rank())
        if step is None:
            # Nothing announced this backward: its loss was not made from the forward's outputs.
            # Without a forward either, it is the inner module's own, or another's with this parameter.
            expected, is_done = self.expected, self.expected.is_done_in(current_backward())
            step = self._open_step(is_synced=expected.is_synced and expected.is_open and not is_done)
            step.is_unexpected = not expected.is_open
            step.is_done_in_graph = is_done
        if step.is_synced:
            step.streams.note(self.listener.arrived[-1])
            self._launch_full(step)
            self._count_arrivals(step)
            self._launch_ready(step)

    def _settle(self, param: torch.Tensor) -> None:
        """A DTensor's gradient has come in other placements than the parameter's: settle it if it is sent."""
        step = self._step
        if (self.expected.is_synced and self.expected.is_open) if step is None else step.is_reducing():
            settle(self._placed, [param])

    def _launch_full(self, step: Step) -> None:
        """Launch buckets that came whole, one after the other: the usual case, seen without counting."""
        arrived = self.listener.arrived
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
        arrived = self.listener.arrived
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
        name, is_skipped = self.members[index].spec.name, index in step.skipped
        raise came_twice(self._rank(), name, is_skipped=is_skipped, is_static=self.is_static)

    def _launch_ready(self, step: Step) -> None:
        if self.is_static and not self._knows_counts:
            return  # how often each parameter comes is known at the end of the first step
        while step.num_launched < len(self.buckets.buckets) and step.remaining[step.num_launched] == 0:
            self._launch(step)

    def _launch(self, step: Step, *, has_all: bool = False) -> None:
        if step.reduction is None:
            self.times.communication_begins()
            step.reduction = self.make_reduction()
        bucket = self.buckets.buckets[step.num_launched]
        used = None if has_all else [self._is_used[index] for index in bucket.plan.params]
        with step.streams.joined(bucket.plan.device):
            bucket.collect(step.reduction, used, step.held[step.num_launched])
        step.num_launched += 1
        bucket.launch(step.reduction)

    def make_reduction(self) -> Reduction:
        """How gradients are reduced now."""
        divisor = self.find_divisor()
        return Reduction(
            self.group, divisor, self.num_begun, self._number, self.hook, self.hook_state, self.is_even
        )

    # Backward ends

    @one_at_a_time
    def _end(self) -> None:
        step = self._step
        if step is None:
            return
        step.has_ended = True  # if something is raised now it stays, for the next forward to clear
        if not step.is_synced:
            self._keep_local(step)
        elif self.listener.arrived or not self._nodes.are_only_looked_at(step.roots):
            self.times.backward_ends()
            step.num_early = step.num_launched
            self._count_arrivals(step)
            self._reduce_rest(step)
        else:
            self.num_begun -= 1  # the other ranks may not have asked
        self._step = None
        if self.listener.arrived and current_node() is None:  # neither autograd.grad nor a checkpoint's own
            self.expected.is_open = False
        self.listener.arrived.clear()
        self.expected.has_left, self.expected.graph_backward = False, None

    def _keep_local(self, step: Step) -> None:
        """Gradients of this backward stay this rank's own, and are added to those of the next reduction."""
        if step.is_done_in_graph:
            return
        arrived = self.listener.arrived
        self.expected.has_unsynced = True
        for param in arrived:
            self._is_used[self._index_of[id(param)]] |= param.grad is not None
        is_ours = step.is_unexpected and not any(is_heard_elsewhere(param, self) for param in arrived)
        if is_ours and not self._has_warned:
            self._has_warned = True
            name = self.members[self._index_of[id(arrived[-1])]].spec.name
            warnings.warn(unexpected_words(self._rank(), name), stacklevel=2)

    def _reduce_rest(self, step: Step) -> None:
        settle(self._placed, self._params)  # those that came without sync alone
        while step.num_launched < len(self.buckets.buckets):
            self._launch(step)
        assert step.reduction is not None
        for bucket in self.buckets.buckets:
            bucket.finish(step.reduction)
        used_anywhere = None
        if self.hook is not None:
            used_anywhere = agree_on_used(self.buckets.find_used(), step.reduction, self._message_device)
        for bucket in self.buckets.buckets:
            used = None if used_anywhere is None else [used_anywhere[index] for index in bucket.plan.params]
            has_grad = bucket.hand_out(used)
            for index, has_one in zip(bucket.plan.params if step.deferred else (), has_grad, strict=False):
                if has_one and index in step.deferred:
                    has_stepped = getattr(self.hook, "steps_optimizers", False)
                    run_deferred(self._params[index], step.number, has_stepped=has_stepped)
        self.times.communication_ends()
        if self.is_static and not self._knows_counts and any(step.counts):
            self._expected, self._knows_counts = list(step.counts), True
        has_unused = not all(all(bucket.used) for bucket in self.buckets.buckets)
        self._end_reduction()
        self._learn_order(step)
        if self.on_unused is not None and has_unused:
            self.on_unused()  # last: it may raise on this rank alone

    def _end_reduction(self) -> None:
        self._is_used = [False] * len(self.members)
        self.expected.has_unsynced = False
        self.num_steps += 1

    def end_in_graph(self, order: Sequence[int]) -> None:
        """A graph has reduced all gradients; it made them in this order."""
        self._end_reduction()
        self.plans.learn_from_graph(order, self.group, self._message_device)

    def _learn_order(self, step: Step) -> None:
        """Plan for the order in which gradients came, and listen to the last of each bucket."""
        is_late = step.num_early < len(self.buckets.buckets)
        if self.plans.is_learned and not is_late and not step.streams.are_several:
            return
        arrivals = [self._index_of[id(param)] for param in self.listener.arrived]
        order = None if self.expected.is_traced else arrivals
        self.plans.learn(order, self.group, self._message_device)
        if step.streams.are_several:
            self.listener.listen(range(len(self.members)))  # each must say on which it comes
        # A backward that nothing announces can be noticed by any parameter: then all must call.
        elif step.roots and arrivals:
            self.listener.listen(self.buckets.find_last(arrivals))

    def _rank(self) -> int:
        return state_of(self.group).global_rank

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
