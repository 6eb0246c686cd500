"""The reducer of a replicated module, as compiled graphs see it.

Where Dynamo traces the module's forward, marks are put on the gradients of its parameters
(weft.compiler.ops). The compiled backward then reduces them in buckets, reports to the reducer and hands
means to autograd. Where it can't, the reducer works as without a compiler. Buckets and collectives are the
same both ways.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from weft import comm
from weft.autograd import current_backward
from weft.comm.group import resolve_group, state_of
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from weft.comm_hooks.mean import FEATURE, only_tensor
from weft.compiler import (
    Bucket,
    Slot,
    Wire,
    current_trace,
    enlist,
    form_in_force,
    install,
    note_owner,
    settings,
)
from weft.data_parallel.arrivals import defer_hooks, defer_torch_optimizers
from weft.data_parallel.bucket_plan import resolve_caps
from weft.data_parallel.buckets import DenseBucket, Reduction, agree_on_used, call_hook
from weft.data_parallel.flat_gradients import sum_of_step_marks
from weft.data_parallel.parameters import ModuleTensors
from weft.data_parallel.reducer import ForwardState, Reducer
from weft.errors import DesyncError, InternalError

# Hooks that a graph replaces by ops of its own, and the dtype in which they send.
_COMPILABLE_HOOKS: dict[Any, torch.dtype | None] = {
    allreduce_hook: None,
    fp16_compress_hook: torch.float16,
    bf16_compress_hook: torch.bfloat16,
}


class CompiledReducer:
    """Answers for a replicated module's gradients towards graphs (`compiler.ops.GradientOwner`).

    Dynamo reads its plain attributes and guards on them.
    """

    def __init__(self, reducer: Reducer, tensors: ModuleTensors, *, forward_sync_buffers: bool) -> None:
        self._reducer = reducer
        self._caps = reducer.bucket_set.caps
        self.number = reducer.forward_state.owner = enlist(self)
        self.has_nothing_to_reduce = False
        self.is_compilable = False  # graphs can reduce these gradients
        self.has_graph_break = False  # the module's forward doesn't fit into one graph
        self.wire = ""
        self.first_rank = state_of(reducer.group).ranks[0]
        self.forward_sync_buffers = bool(tensors.buffer_slots) and forward_sync_buffers
        self.params = reducer.params
        self._reduction: Reduction | None = None  # of the graph that reduces now
        self._order: Sequence[int] = ()  # in which that graph makes the gradients
        self._trace: object = None
        self._is_used = False  # a forward has been traced
        myself: weakref.ref[CompiledReducer] = weakref.ref(self)
        self.note_before = _weakly(myself, CompiledReducer._note_before)
        self.note_marked = _weakly(myself, CompiledReducer._note_marked)
        self.note_after = _weakly(myself, CompiledReducer._note_after)

    def parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters, by index."""
        return iter(enumerate(self.params))

    # While a forward is traced

    def _note_before(self) -> None:
        install()
        defer_torch_optimizers(self.params)
        self.listen()
        self._trace = current_trace()

    def _note_marked(self) -> None:
        note_owner(self.number)

    def _note_after(self) -> None:
        if current_trace() != self._trace:
            self.has_graph_break = True

    def note_graph_break(self) -> None:
        """A forward that was traced at its start has ended outside of any graph."""
        self.has_graph_break = True
        self._reducer.forward_state.in_traced_forward = False
        self._reducer.forward_state.has_uncompiled_grads = True

    def listen(self) -> None:
        """Be ready for a backward that compiled autograd traces."""
        self._is_used = True
        self.refresh()
        self._reducer.ready_hooks.install_traced(_make_traced_hook(self._reducer.forward_state))
        for param in self.params:  # a compiled backward may be noticed too late for that
            defer_hooks(param, weakref.ref(self._reducer))

    def refresh(self) -> None:
        """Update what graphs are compiled for: the hook, the group and the buckets."""
        if not self._is_used:
            return
        reducer = self._reducer
        is_greedy = form_in_force() != "buffers"
        cap_mb = settings.bucket_cap_mb
        reducer.bucket_set.resize(
            self._caps if cap_mb is None else resolve_caps(cap_mb, None), is_greedy=is_greedy
        )
        self.has_nothing_to_reduce = not reducer.has_hooks
        self.is_compilable = reducer.has_hooks and not any(
            ddp_param.dtensor_spec is not None or ddp_param.spec.is_sparse for ddp_param in reducer.ddp_params
        )
        self.wire = reducer.forward_state.wire = self._make_wire().encode() if self.is_compilable else ""

    def _make_wire(self) -> Wire:
        reducer = self._reducer
        hook, group = reducer.hook, reducer.group
        indices = repr([bucket.params for bucket in reducer.bucket_set.plan])
        plan = hashlib.sha256(indices.encode()).hexdigest()[:12]
        dtypes = {ddp_param.spec.dtype for ddp_param in reducer.ddp_params}
        is_float = all(dtype.is_floating_point for dtype in dtypes)
        if hook is None:
            return Wire(self.number, group.group_name, group.size(), None, plan, True, is_float)
        narrow = _COMPILABLE_HOOKS.get(hook)
        is_smaller = narrow is None or all(dtype.itemsize > narrow.itemsize for dtype in dtypes)
        if hook not in _COMPILABLE_HOOKS or not is_float or not is_smaller:
            return Wire(self.number, group.group_name, group.size(), None, plan, False, False)
        group = resolve_group(reducer.hook_state)
        return Wire(self.number, group.group_name, group.size(), narrow, plan, False, True)

    # While a graph reduces

    def buckets(self) -> list[Bucket]:
        """The reducer's buckets; none where graphs can't reduce them."""
        if not self.is_compilable:
            return []
        specs = [ddp_param.spec for ddp_param in self._reducer.ddp_params]
        return [
            Bucket(
                tuple(
                    Slot(index, specs[index].name, specs[index].shape, specs[index].strides)
                    for index in plan.params
                ),
                plan.dtype,
                plan.device,
            )
            for plan in self._reducer.bucket_set.plan
        ]

    def begin(self, order: Sequence[int]) -> list[torch.Tensor]:
        """A graph begins to reduce, in memory of its own; returns the flags and marks of each bucket."""
        self.open(order)
        marks: list[torch.Tensor] = []
        for plan in self._reducer.bucket_set.plan:
            tail = torch.ones(len(plan.params) + 1, dtype=plan.dtype, device=plan.device)
            tail[-1] = self._current_reduction().mark(plan.dtype)
            marks.append(tail)
        return marks

    def end(self, reduced: Sequence[torch.Tensor]) -> None:
        """The graph has reduced, the flags and marks too."""
        reduction = self._current_reduction()
        if self._reducer.hook is None:
            for plan, marks in zip(self._reducer.bucket_set.plan, reduced, strict=True):
                total = sum_of_step_marks(marks[-1:], reduction.group.size())
                if total is not None:
                    reduction.check_step(total, plan.dtype)
        self._close()

    def place(self, bucket: int, at: int) -> tuple[torch.Tensor, float]:
        """The view of a bucket in which the graph makes a gradient, and the factor for it."""
        return self._dense(bucket).destination(self._current_reduction(), at)

    def send(self, bucket: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start the reduction of a bucket of the graph's gradients, in the reducer's memory."""
        dense, reduction = self._dense(bucket), self._current_reduction()
        flat = dense.collect_traced(reduction, gradients)
        dense.start(reduction)
        return flat

    def _dense(self, bucket: int) -> DenseBucket:
        found = self._reducer.bucket_set.buckets[bucket]
        if not isinstance(found, DenseBucket):
            raise InternalError("a graph sent gradients to a bucket of sparse ones")
        return found

    def receive(self) -> None:
        """Wait for the buckets that were sent."""
        for bucket in self._reducer.bucket_set.buckets:
            bucket.finish(self._current_reduction())
        self._close()

    def open(self, order: Sequence[int]) -> None:
        """A graph begins to reduce, in the reducer's memory."""
        reducer = self._reducer
        reducer.check_last_backward()
        reducer.num_reductions += 1
        reducer.forward_state.compiled_backward = current_backward()
        self._reduction = reducer.make_reduction()
        self._order = order

    def _current_reduction(self) -> Reduction:
        if self._reduction is None:
            raise InternalError("a graph goes on with a reduction that it has not begun")
        return self._reduction

    def _close(self) -> None:
        reducer = self._reducer
        if reducer.hook is not None:
            agree_on_used([True] * len(self.params), self._current_reduction(), self.params[0].device)
        self._reduction = None
        state, before = reducer.forward_state, reducer.bucket_set.plan
        state.is_backward_pending = state.compiled_backward is not None  # else autograd hands over nothing
        reducer.finish_compiled(self._order)
        if reducer.bucket_set.plan is not before:
            self.refresh()

    def leave(self) -> None:
        """A graph makes gradients of the module and doesn't reduce them."""
        self._reducer.forward_state.has_uncompiled_grads = True

    def reduce_one(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """The mean of one gradient, by the module's hook if it has one."""
        reducer = self._reducer
        reducer.forward_state.has_unsynced = reducer.forward_state.has_uncompiled_grads = False
        self._check_same(index)
        if reducer.hook is None:
            return comm.all_reduce(
                gradient * (1.0 / reducer.group.size()),
                group=reducer.group,
                feature=FEATURE,
                label=reducer.ddp_params[index].spec.name,
            ).wait()
        flat = gradient.reshape(-1).clone()
        bucket = GradBucket(index, flat, [self.params[index]], is_last=index == 0)
        bucket.label = reducer.ddp_params[index].spec.name
        mean = only_tensor(call_hook(reducer.make_reduction(), bucket).wait())
        return mean.reshape(gradient.shape).to(gradient.dtype)

    def _check_same(self, index: int) -> None:
        """Raise DesyncError where ranks reduce gradients of different parameters."""
        extremes = torch.tensor([index, -index], device=self.params[index].device)
        group = self._reducer.group
        highest, lowest = comm.all_reduce(extremes, ReduceOp.MAX, group, feature=FEATURE).wait().tolist()
        if highest != -lowest:
            name = self._reducer.ddp_params[index].spec.name
            state = state_of(group)
            raise DesyncError(
                f"rank {state.global_rank}: the ranks of {state.words()} reduce gradients of different "
                f"parameters in a backward that compiled autograd has traced: here it is '{name}'. Ranks "
                "have used different parameters. Run such backwards without compiled autograd."
            )


def _make_traced_hook(state: ForwardState) -> Callable[[torch.Tensor, int], None]:
    """The hook that compiled autograd traces where a gradient arrives."""

    def reduce(param: torch.Tensor, index: int) -> None:
        if not state.is_backward_pending or param.grad is None:
            return
        if state.is_synced:
            param.grad = torch.ops.weft.reduce_gradient(param.grad, state.owner, index, state.wire)
        else:
            state.has_unsynced = True

    return reduce


def _weakly(
    ref: weakref.ref[CompiledReducer], method: Callable[[CompiledReducer], None]
) -> Callable[[Any], None]:
    """A function for `at_trace` that doesn't keep the object alive."""

    def run(_: Any) -> None:
        reducer = ref()
        if reducer is not None:
            method(reducer)

    return run
