"""Reduce gradients while backward makes them, bucket by bucket.

Invariant: every rank starts its buckets in plan order. A bucket goes when all its gradients are ready and
the buckets before it have gone; what is left goes when the backward ends. So ranks can't disagree on the
order, and a parameter without a gradient delays its bucket and breaks nothing.

How long state lives: the bucket set until it is rebuilt, once, after the first reduction; `ForwardState`
from a forward to its backward; `BackwardState` for one backward; a collective's handle in its bucket.

What a bucket does with its gradients is buckets.py's work; which parameters' hooks call, arrivals.py's.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from weft.autograd import (
    announce_gradients,
    current_backward,
    current_node,
    on_backward_end,
    traced_inside_only,
)
from weft.comm.group import state_of
from weft.comm.transforms import beside_transforms
from weft.comm_hooks.bucket import GradHook
from weft.compiler import is_tracing
from weft.data_parallel.arrivals import (
    AccumulationNodes,
    GradReadyHooks,
    GradStreams,
    defer_all_hooks,
    defer_hooks,
    has_other_reducer,
    hooks_of,
    is_reduced_by_other,
    run_deferred,
)
from weft.data_parallel.bucket_plan import BucketCaps
from weft.data_parallel.buckets import BucketSet, Reduction, agree_on_used, reducer_ids
from weft.data_parallel.buffers import BufferHook
from weft.data_parallel.parameters import DDPParam, redistribute_grads
from weft.errors import StateError


def serialized(method: Callable[..., None]) -> Callable[..., None]:
    """Run one such method of an object with a `_mutex` at a time: autograd has a thread for each device."""

    @functools.wraps(method)
    @traced_inside_only
    def run(self: Any, **kwargs: Any) -> None:
        with self._mutex:
            method(self, **kwargs)

    return run


class ForwardState:
    """What the last forward told the reducer about the backward to come.

    Compiled code reads it, and writes to it and nothing else: Dynamo takes its time for each object.
    """

    def __init__(self) -> None:
        self.in_traced_forward = False  # a compiled forward that marks its gradients is under way
        self.last_forward_synced = True  # only then may buffers differ between ranks
        self.is_synced = True  # the backward reduces
        self.is_sync_forced = False  # it reduces even if its forward ran under no_sync
        self.is_backward_pending = False
        self.is_traced = False  # a compiled forward: gradients arrive all at once, in no telling order
        self.has_unsynced = False  # local gradients wait for the next reduction
        self.has_uncompiled_grads = False  # a compiled graph has left gradients to the reducer
        self.compiled_backward: int | None = None  # the last backward in which a graph has reduced
        self.owner = -1  # the number by which graphs of compiled autograd name the reducer
        self.wire = ""  # how gradients travel, encoded for graphs

    def is_reduced_by_graph_in(self, backward: int | None) -> bool:
        """Whether graphs have reduced all gradients of this backward."""
        return backward is not None and self.compiled_backward == backward and not self.has_uncompiled_grads


@dataclass(slots=True)
class BackwardState:
    """One backward, from its first hook to its end. Parameters and buckets are named by index."""

    end_callback: weakref.ref[Callable[[], None]] | None = None  # held by the backward alone
    backward_id: int | None = None
    has_ended: bool = False
    is_synced: bool = False  # its gradients are reduced
    is_unexpected: bool = False  # no forward of the module led to it
    is_reduced_by_graph: bool = False
    num_counted: int = 0  # arrivals that have been counted
    counts: list[int] = field(default_factory=list[int])  # arrivals of each parameter
    num_pending: list[int] = field(default_factory=list[int])  # gradients that each bucket waits for
    unused: set[int] = field(default_factory=set[int])  # parameters outside of the graph, not waited for
    params_with_hooks: set[int] = field(default_factory=set[int])  # whose hooks wait for the mean
    # The user's own gradients, which the mean is copied into, by place in each bucket.
    user_grads: list[dict[int, torch.Tensor]] = field(default_factory=list[dict[int, torch.Tensor]])
    roots: list[Any] = field(default_factory=list[Any])  # nodes through which it entered the graph
    num_started: int = 0  # buckets
    num_early: int = 0  # of those, before the backward ended
    reduction: Reduction | None = None
    streams: GradStreams = field(default_factory=GradStreams)

    def is_reducing(self) -> bool:
        """Whether the backward goes on and its gradients are reduced."""
        return self.is_synced and not self.has_failed()

    def has_failed(self) -> bool:
        """Whether the backward is gone and has left something to be cleared."""
        return self.has_ended or (self.end_callback is not None and self.end_callback() is None)


class Reducer:
    """Reduces the gradients of some parameters over a group, backward by backward."""

    def __init__(
        self,
        ddp_params: Sequence[DDPParam],
        group: ProcessGroup,
        caps: BucketCaps,
        *,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        self.ddp_params = ddp_params
        self.params = [ddp_param.param for ddp_param in ddp_params]
        self.group = group
        self.bucket_set = BucketSet(ddp_params, caps, gradient_as_bucket_view=gradient_as_bucket_view)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = False
        self.hook: GradHook | None = None
        self.hook_state: Any = None
        self.find_divisor: Callable[[], int] = group.size
        self.on_unused: Callable[[], None] | None = None  # may raise
        self.num_steps = 0
        self.num_reductions = 0  # begun, those that failed included
        self.has_even_inputs = True  # every rank takes part with inputs of its own
        self.times = StepTimes()
        self.forward_state = ForwardState()
        self._backward: BackwardState | None = None
        self._expected: list[int] = [1] * len(ddp_params)  # gradients of each parameter in a backward
        self._knows_counts = False  # `_expected` is from the first step of a static graph
        self._is_used = [False] * len(ddp_params)  # on this rank, since the last reduction
        self._device = ddp_params[0].spec.device
        self._reducer_id = next(reducer_ids(group))  # alike on all ranks that make modules in one order
        self._mutex = threading.RLock()
        self._has_warned = False  # of a backward without a forward
        self._nodes = AccumulationNodes(self.params)
        self._index_of = {id(param): index for index, param in enumerate(self.params)}
        self._dtensor_params = {
            id(ddp_param.param): ddp_param for ddp_param in ddp_params if ddp_param.dtensor_spec is not None
        }
        redistribute = self._redistribute_grad if self._dtensor_params else None
        self.ready_hooks = GradReadyHooks(self.params, self._on_grads_ready, redistribute)
        self._hook_dicts: list[dict[int, Any]] = []
        self._install_hooks()

    @property
    def has_hooks(self) -> bool:
        """Whether it reduces at all: a single rank with neither a hook nor DTensors has nothing to reduce."""
        return self.ready_hooks.is_installed

    def _install_hooks(self) -> None:
        if self.group.size() > 1 or self.hook is not None or self._dtensor_params:
            self.ready_hooks.install(range(len(self.params)))
            self._hook_dicts = [hooks_of(param) for param in self.params]
            for param in self.params:  # so that none runs before the first backward is noticed
                defer_hooks(param, weakref.ref(self))

    def set_hook(self, hook: GradHook, state: Any) -> None:
        """Reduce each bucket with this hook."""
        self.hook, self.hook_state = hook, state
        self._install_hooks()

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with another group, from a plan of its own."""
        self.group = group
        self.find_divisor = group.size
        self.num_reductions = 0
        self._reducer_id = next(reducer_ids(group))
        self._backward = None
        self.bucket_set.reset()
        self._install_hooks()

    def is_reducing(self) -> bool:
        """Whether a backward goes on whose gradients are reduced."""
        return self._backward is not None and self._backward.is_synced

    def make_reduction(self) -> Reduction:
        """How gradients are reduced now."""
        return Reduction(
            self.group,
            self.find_divisor(),
            self.num_reductions,
            self._reducer_id,
            self.hook,
            self.hook_state,
            self.has_even_inputs,
        )

    # Forward

    def expect_backward(self, *, is_synced: bool) -> None:
        """A forward has run; its backward reduces, or not."""
        self.check_last_backward()
        state = self.forward_state
        state.is_synced, state.is_backward_pending, state.is_traced = is_synced, True, False

    def check_last_backward(self) -> None:
        """Clear what a failed backward left; raise StateError for one that reduced nothing unseen.

        Whether ranks are still in step is found by the next reduction.
        """
        backward, ready_params = self._backward, self.ready_hooks.ready_params
        if backward is not None and backward.has_failed():
            self._backward = None
            ready_params.clear()
            for bucket in self.bucket_set.buckets:
                bucket.discard()
        if backward is None and ready_params and current_backward() is None:
            ready_params.clear()
            if self.forward_state.is_backward_pending:
                self.forward_state.is_backward_pending = False
                self.ready_hooks.install(range(len(self.params)))
                raise bypassed_outputs_error(self._rank())

    # Backward begins

    @traced_inside_only
    def begin_from_output(self, is_synced: bool, hook: BufferHook | None, _: torch.Tensor) -> None:
        """The gradient hook of each output of a forward: its backward has begun."""
        if is_tracing():  # compiled autograd: gradients are reduced where they are made
            return
        state = self.forward_state
        is_sync_forced, state.is_sync_forced = state.is_sync_forced, False
        with beside_transforms("data parallel"):
            self._begin_backward(is_synced=is_synced or is_sync_forced)
            if hook is not None:
                hook.wait_at_backward_end()

    @serialized
    def _begin_backward(self, *, is_synced: bool) -> None:
        if not self.ready_hooks.is_installed:
            return
        backward = self._backward
        if backward is None or backward.has_failed():
            self.check_last_backward()
            backward = self._new_backward(is_synced=is_synced)
        elif is_synced and not backward.is_synced:
            self._begin_reduction(backward)
        backward.is_unexpected = False
        backward.roots.append(current_node())

    def _new_backward(self, *, is_synced: bool) -> BackwardState:
        at_end = functools.partial(self._end_backward)  # a new object, so that only the backward holds it
        backward = self._backward = BackwardState(weakref.ref(at_end), current_backward())
        on_backward_end(at_end)
        announce_gradients(self.params, renew=self.bucket_set.release_buffers)
        if is_synced:
            self._begin_reduction(backward)
        return backward

    def _begin_reduction(self, backward: BackwardState) -> None:
        if self._is_reduced_by_other():
            return
        backward.is_synced = True
        self.num_reductions += 1
        self.times.mark("backward_start")
        backward.num_pending = self.bucket_set.count_expected(self._expected)
        backward.counts = [0] * len(self.params)
        if self._dtensor_params:  # what arrived before this backward was known to reduce
            redistribute_grads(self._dtensor_params, self.ready_hooks.ready_params)
        backward.user_grads = self.bucket_set.find_user_grads(self.params)
        if sum(map(len, self._hook_dicts)) > len(self.params):  # there are hooks beside ours
            arriving = self.ready_hooks.ready_params[-1:] if not backward.roots else ()
            backward.params_with_hooks = defer_all_hooks(self.params, weakref.ref(self), arriving)
        if self.find_unused_parameters and not self.static_graph and current_backward() is not None:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                self._skip_unused(backward)

    def _is_reduced_by_other(self) -> bool:
        """Whether another module, inside this one or around it, reduces all of these gradients already."""
        if sum(map(len, self._hook_dicts)) == len(self.params):  # there are no hooks beside ours
            return False
        shared = [ddp_param for ddp_param in self.ddp_params if is_reduced_by_other(ddp_param.param, self)]
        if shared and len(shared) < len(self.params):
            raise shared_params_error(self._rank(), shared[0].spec.name)
        return bool(shared)

    def _skip_unused(self, backward: BackwardState) -> None:
        unused = self._nodes.find_unused()
        if self._dtensor_params:  # the gradients that they got under no_sync
            redistribute_grads(self._dtensor_params, (self.params[index] for index in unused))
        for index in unused:
            backward.unused.add(index)
            backward.num_pending[self.bucket_set.bucket_of[index]] -= 1
        if len(backward.unused) < len(self.params):
            self._start_ready_buckets(backward)

    # Gradients arrive

    @serialized
    def _on_grads_ready(self) -> None:
        """Start the buckets that are complete. Called for the last parameter of each bucket, or for all."""
        backward = self._backward
        if backward is not None and backward.has_failed():
            self.check_last_backward()
            raise failed_backward_error(self._rank())
        if backward is None:
            # Nothing announced this backward: its loss was not made from the forward's outputs.
            # Without a forward either, it is the inner module's own, or another's with this parameter.
            state = self.forward_state
            is_reduced = state.is_reduced_by_graph_in(current_backward())
            is_synced = state.is_synced and state.is_backward_pending and not is_reduced
            backward = self._new_backward(is_synced=is_synced)
            backward.is_unexpected = not state.is_backward_pending
            backward.is_reduced_by_graph = is_reduced
        if backward.is_synced:
            backward.streams.record(self.ready_hooks.ready_params[-1])
            self._start_complete_buckets(backward)
            self._count_arrivals(backward)
            self._start_ready_buckets(backward)

    def _redistribute_grad(self, param: torch.Tensor) -> None:
        """Bring a DTensor's gradient to the parameter's placements, if this backward reduces it."""
        state, backward = self.forward_state, self._backward
        if state.is_synced and state.is_backward_pending if backward is None else backward.is_reducing():
            redistribute_grads(self._dtensor_params, [param])

    def _start_complete_buckets(self, backward: BackwardState) -> None:
        """Start buckets whose gradients arrived all together: the usual case, found without counting."""
        if self.static_graph or backward.unused:
            return
        buckets, ready_params = self.bucket_set, self.ready_hooks.ready_params
        while backward.num_started < len(buckets.buckets):
            ids = buckets.ids[backward.num_started]
            arrived = ready_params[backward.num_counted : backward.num_counted + len(ids)]
            is_fresh = backward.num_pending[backward.num_started] == len(ids) == len(arrived)
            if not is_fresh or not ids.issubset(map(id, arrived)):
                return
            backward.num_counted += len(ids)
            backward.num_pending[backward.num_started] = 0
            self._start_bucket(backward, has_all=True)

    def _count_arrivals(self, backward: BackwardState) -> None:
        ready_params = self.ready_hooks.ready_params
        while backward.num_counted < len(ready_params):
            param = ready_params[backward.num_counted]
            backward.num_counted += 1
            index = self._index_of[id(param)]
            self._is_used[index] |= param.grad is not None
            backward.counts[index] += 1
            bucket = self.bucket_set.bucket_of[index]
            is_late = bucket < backward.num_started
            if is_late or backward.counts[index] > self._expected[index] or index in backward.unused:
                self._check_repeated(backward, index)
            backward.num_pending[bucket] -= 1

    def _check_repeated(self, backward: BackwardState, index: int) -> None:
        bucket = self.bucket_set.bucket_of[index]
        if self.static_graph and bucket >= backward.num_started:
            backward.num_pending[bucket] += 1  # one more than in the first step, but in time
            return
        name, is_skipped = self.ddp_params[index].spec.name, index in backward.unused
        raise ready_twice_error(self._rank(), name, is_skipped=is_skipped, static_graph=self.static_graph)

    def _start_ready_buckets(self, backward: BackwardState) -> None:
        if self.static_graph and not self._knows_counts:
            return  # how often each parameter arrives is known at the end of the first step
        num_buckets = len(self.bucket_set.buckets)
        while backward.num_started < num_buckets and backward.num_pending[backward.num_started] == 0:
            self._start_bucket(backward)

    def _start_bucket(self, backward: BackwardState, *, has_all: bool = False) -> None:
        if backward.reduction is None:
            self.times.mark("comm_start")
            backward.reduction = self.make_reduction()
        bucket = self.bucket_set.buckets[backward.num_started]
        used = None if has_all else [self._is_used[index] for index in bucket.plan.params]
        with backward.streams.waiting_for_all(bucket.plan.device):
            bucket.collect_grads(backward.reduction, used, backward.user_grads[backward.num_started])
        backward.num_started += 1
        bucket.start(backward.reduction)

    # Backward ends

    @serialized
    def _end_backward(self) -> None:
        backward, state, ready_params = self._backward, self.forward_state, self.ready_hooks.ready_params
        if backward is None:
            return
        backward.has_ended = True  # if something is raised now it stays, for the next forward to clear
        if not backward.is_synced:
            self._keep_local(backward)
        elif ready_params or not self._nodes.are_bypassed(backward.roots):
            self.times.mark("backward_end")
            backward.num_early = backward.num_started
            self._count_arrivals(backward)
            self._finish_reduction(backward)
        else:
            self.num_reductions -= 1  # torch.autograd.grad: the other ranks may not have called it
        self._backward = None
        if ready_params and current_node() is None:  # neither autograd.grad nor a checkpoint's own backward
            state.is_backward_pending = False
        ready_params.clear()
        state.has_uncompiled_grads, state.compiled_backward = False, None

    def _keep_local(self, backward: BackwardState) -> None:
        """Leave the gradients local, to be added up for the next reduction; warn if no forward led here."""
        if backward.is_reduced_by_graph:
            return
        ready_params = self.ready_hooks.ready_params
        self.forward_state.has_unsynced = True
        for param in ready_params:
            self._is_used[self._index_of[id(param)]] |= param.grad is not None
        is_ours = backward.is_unexpected and not any(has_other_reducer(param, self) for param in ready_params)
        if is_ours and not self._has_warned:
            self._has_warned = True
            name = self.ddp_params[self._index_of[id(ready_params[-1])]].spec.name
            warnings.warn(bypassed_forward_message(self._rank(), name), stacklevel=2)

    def _finish_reduction(self, backward: BackwardState) -> None:
        """Start the buckets that are left, wait for all, make the means the gradients, run users' hooks."""
        buckets = self.bucket_set.buckets
        if self._dtensor_params:  # gradients that arrived under no_sync alone
            redistribute_grads(self._dtensor_params, self.params)
        while backward.num_started < len(buckets):
            self._start_bucket(backward)
        assert backward.reduction is not None
        for bucket in buckets:
            bucket.finish(backward.reduction)
        used_globally = None
        if self.hook is not None:
            used_globally = agree_on_used(self.bucket_set.find_used(), backward.reduction, self._device)
        for bucket in buckets:
            indices = bucket.plan.params
            used = None if used_globally is None else [used_globally[index] for index in indices]
            has_grad = bucket.assign_grads(used)
            for index, has_one in zip(indices if backward.params_with_hooks else (), has_grad, strict=False):
                if has_one and index in backward.params_with_hooks:
                    has_stepped = getattr(self.hook, "steps_optimizers", False)
                    run_deferred(self.params[index], backward.backward_id, has_stepped=has_stepped)
        self.times.end_step()
        if self.static_graph and not self._knows_counts and any(backward.counts):
            self._expected, self._knows_counts = list(backward.counts), True
        has_unused = not all(all(bucket.used) for bucket in buckets)
        self._reset_after_reduction()
        self._rebuild_buckets(backward)
        if self.on_unused is not None and has_unused:
            self.on_unused()  # last: it may raise on this rank alone

    def _reset_after_reduction(self) -> None:
        self._is_used = [False] * len(self.params)
        self.forward_state.has_unsynced = False
        self.num_steps += 1

    def _rebuild_buckets(self, backward: BackwardState) -> None:
        """Rebuild by the order of arrival, the first time, and let the last parameter of each bucket call."""
        is_late = backward.num_early < len(self.bucket_set.buckets)
        if self.bucket_set.is_rebuilt and not is_late and not backward.streams.has_several:
            return
        arrivals = [self._index_of[id(param)] for param in self.ready_hooks.ready_params]
        order = None if self.forward_state.is_traced else arrivals
        self.bucket_set.rebuild_once(order, self.group, self._device)
        if backward.streams.has_several:
            self.ready_hooks.install(range(len(self.params)))  # each must record its stream
        # A backward that no output announces can be noticed by any parameter: then all must call.
        elif backward.roots and arrivals:
            self.ready_hooks.install(self.bucket_set.find_last(arrivals))

    def finish_compiled(self, order: Sequence[int]) -> None:
        """A compiled graph has reduced all gradients; it made them in this order."""
        self._reset_after_reduction()
        self.bucket_set.rebuild_from_graph(order, self.group, self._device)

    def shadow(self) -> None:
        """Take part in a reduction of the active ranks with no gradients of one's own (uneven inputs).

        The parameters get their mean, so that an optimizer which shards its work finds the same gradients on
        every rank.
        """
        for param in self.params:
            param.grad = None
        backward = BackwardState()
        self._begin_reduction(backward)
        self._finish_reduction(backward)

    def _rank(self) -> int:
        return state_of(self.group).global_rank


def ready_twice_error(rank: int, name: str, *, is_skipped: bool, static_graph: bool) -> StateError:
    """A parameter's gradient arrived after it had been counted as complete."""
    if static_graph:
        return StateError(
            f"rank {rank}: Expected to mark a variable ready only once. Parameter '{name}' got more "
            "gradients than in the first step: the graph has changed, though static_graph=True promised "
            "that it wouldn't. Leave static_graph out."
        )
    if is_skipped:
        cause = (
            "find_unused_parameters=True took it for unused, since the graph of this backward didn't hold "
            "it: reentrant checkpointing hides what it recomputes. weft handles unused parameters without "
            "that flag"
        )
    else:
        cause = (
            "it got a gradient twice in one backward, as when a layer is used in two reentrant checkpoints, "
            "or backward ran through the module in parts"
        )
    return StateError(
        f"rank {rank}: Expected to mark a variable ready only once. Parameter '{name}': {cause}. Use "
        "torch.utils.checkpoint with use_reentrant=False, or static_graph=True if the graph is the same in "
        "every step."
    )


def bypassed_outputs_error(rank: int) -> StateError:
    """Gradients arrived in a backward that didn't come through the outputs of forward."""
    return StateError(
        f"rank {rank}: the last backward brought gradients but did not come through the outputs of forward, "
        "as those before it did, and they were not reduced. Make the loss from what forward returns, in "
        "every step."
    )


def failed_backward_error(rank: int) -> StateError:
    """A backward follows one that failed, without a forward in between."""
    return StateError(
        f"rank {rank}: a backward that failed was followed by another without a forward in between. Run "
        "forward again."
    )


def bypassed_forward_message(rank: int, name: str) -> str:
    """The warning for a backward that no forward of the wrapped module led to."""
    return (
        f"rank {rank}: parameter '{name}' got a gradient in a backward that no forward of the wrapped module "
        "led to: the module inside was called itself, or one forward has several backwards that don't come "
        "through its outputs. Such gradients stay local until the next reduction. Call the wrapped module."
    )


def shared_params_error(rank: int, name: str) -> StateError:
    """Two reducers reduce some of the same parameters."""
    return StateError(
        f"rank {rank}: parameter '{name}' is reduced by two modules in one backward, which share some "
        "parameters and not all. Wrap it once: replicate children before their parent, which leaves them out."
    )


class StepTimes:
    """Nanoseconds of the last step, as `_get_ddp_logging_data` reports them."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._num_steps = 0

    def mark(self, moment: str) -> None:
        """Note the time of a moment: forward_start, backward_start, comm_start, backward_end or comm_end."""
        self._marks[moment] = time.time_ns()

    def end_step(self) -> None:
        """All means are there."""
        self.mark("comm_end")
        self._num_steps += 1
        for name, value in self.durations().items():
            self._sums[name] = self._sums.get(name, 0) + value

    def durations(self) -> dict[str, int]:
        """How long each part took in the last step."""
        marks = self._marks
        if not {"comm_end", "forward_start", "backward_start", "backward_end", "comm_start"} <= marks.keys():
            return {}  # a rank without inputs makes no step of its own
        overlap = max(0, marks["backward_end"] - marks["comm_start"])
        return {
            "forward_compute_time": marks["backward_start"] - marks["forward_start"],
            "backward_compute_time": marks["backward_end"] - marks["backward_start"],
            "backward_comm_time": marks["comm_end"] - marks["comm_start"],
            "backward_compute_comm_overlap_time": overlap,
        }

    def report(self) -> dict[str, int]:
        """The last step, the mean over all, and the moments of the last step."""
        marks = self._marks
        means = {f"avg_{name}": total // max(self._num_steps, 1) for name, total in self._sums.items()}
        moments = {
            f"{name}_time_{end}": marks[f"{mark}_{end}"]
            for name, mark, end in (
                ("forward_compute", "forward", "start"),
                ("backward_compute", "backward", "start"),
                ("backward_compute", "backward", "end"),
                ("backward_comm", "comm", "start"),
                ("backward_comm", "comm", "end"),
            )
            if f"{mark}_{end}" in marks
        }
        return {**self.durations(), **means, **moments}
