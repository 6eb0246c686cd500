"""A replicated module in a compiled graph: marks on its gradients, and what the graph that reduces them asks.

Where Dynamo traces the module's forward, its parameters get marks on their gradients (weft.compiler.ops). The
compiled backward then reduces them in buckets, tells the reducer so, and hands means to autograd. Where it
can't, the reducer does its work as ever. Buckets and what they carry are the same both ways.
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
from weft.data_parallel.bucket_set import agree_on_used
from weft.data_parallel.buckets import Reduction, call_hook
from weft.data_parallel.dense import DenseBucket
from weft.data_parallel.flat_gradients import sum_of_step_marks
from weft.data_parallel.module_parts import ModuleParts
from weft.data_parallel.plan import resolve_caps
from weft.data_parallel.reducer import Reducer
from weft.data_parallel.step import Expectation
from weft.data_parallel.torch_optimizers import defer_torch_optimizers
from weft.data_parallel.user_hooks import defer_hooks
from weft.errors import DesyncError, InternalError

# Hooks that a graph can do by ops of its own: in which dtype they send.
_PLAIN: dict[Any, torch.dtype | None] = {
    allreduce_hook: None,
    fp16_compress_hook: torch.float16,
    bf16_compress_hook: torch.bfloat16,
}


class GraphSide:
    """What graphs see of a replicated module. Dynamo reads its plain attributes and guards on them."""

    def __init__(self, reducer: Reducer, parts: ModuleParts, *, syncs_buffers: bool) -> None:
        self._reducer = reducer
        self._caps = reducer.plans.caps
        self.number = reducer.expected.owner = enlist(self)
        self.is_idle = False  # there is nothing to reduce
        self.is_fit = False  # graphs can reduce these gradients
        self.is_broken = False  # the module's forward doesn't fit into one graph
        self.wire = ""
        self.first_rank = state_of(reducer.group).ranks[0]
        self.syncs_buffers = bool(parts.buffer_slots) and syncs_buffers
        self.params = [member.param for member in reducer.members]
        self._begun: Reduction | None = None
        self._order: Sequence[int] = ()
        self._trace: object = None
        self._is_seen = False  # by any graph
        myself: weakref.ref[GraphSide] = weakref.ref(self)
        self.note_before = _later(myself, GraphSide._note_before)
        self.note_marked = _later(myself, GraphSide._note_marked)
        self.note_after = _later(myself, GraphSide._note_after)

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
            self.is_broken = True

    def break_off(self) -> None:
        """A forward that was traced at its start ends outside of any graph."""
        self.is_broken = True
        self._reducer.expected.is_inside = False
        self._reducer.expected.has_left = True

    def listen(self) -> None:
        """Be ready for a backward that compiled autograd traces."""
        self._is_seen = True
        self.refresh()
        self._reducer.listener.listen_in_graphs(_make_arrival(self._reducer.expected))
        for param in self.params:  # a compiled backward may tell of itself when it is too late for that
            defer_hooks(param, weakref.ref(self._reducer))

    def refresh(self) -> None:
        """Say again how gradients travel: with which hook, over which group, in which buckets."""
        if not self._is_seen:
            return
        reducer = self._reducer
        is_greedy = form_in_force() != "buffers"
        cap_mb = settings.bucket_cap_mb
        reducer.plans.replan(
            self._caps if cap_mb is None else resolve_caps(cap_mb, None), is_greedy=is_greedy
        )
        self.is_idle = not reducer.is_listening
        self.is_fit = reducer.is_listening and not any(
            member.whole is not None or member.spec.is_sparse for member in reducer.members
        )
        self.wire = reducer.expected.wire = self._make_wire().encode() if self.is_fit else ""

    def _make_wire(self) -> Wire:
        reducer = self._reducer
        hook, group = reducer.hook, reducer.group
        plan = hashlib.sha256(repr([plan.params for plan in reducer.buckets.plan]).encode()).hexdigest()[:12]
        dtypes = {member.spec.dtype for member in reducer.members}
        is_float = all(dtype.is_floating_point for dtype in dtypes)
        if hook is None:
            return Wire(self.number, group.group_name, group.size(), None, plan, True, is_float)
        narrow = _PLAIN.get(hook)
        is_smaller = narrow is None or all(dtype.itemsize > narrow.itemsize for dtype in dtypes)
        if hook not in _PLAIN or not is_float or not is_smaller:
            return Wire(self.number, group.group_name, group.size(), None, plan, False, False)
        group = resolve_group(reducer.hook_state)
        return Wire(self.number, group.group_name, group.size(), narrow, plan, False, True)

    # For the graph that reduces

    def buckets(self) -> list[Bucket]:
        """The reducer's buckets; none where graphs can't reduce them."""
        if not self.is_fit:
            return []
        specs = [member.spec for member in self._reducer.members]
        return [
            Bucket(
                tuple(
                    Slot(index, specs[index].name, specs[index].shape, specs[index].strides)
                    for index in plan.params
                ),
                plan.dtype,
                plan.device,
            )
            for plan in self._reducer.buckets.plan
        ]

    def begin(self, order: Sequence[int]) -> list[torch.Tensor]:
        """The graph of a backward begins to reduce."""
        self.open(order)
        marks: list[torch.Tensor] = []
        for plan in self._reducer.buckets.plan:
            tail = torch.ones(len(plan.params) + 1, dtype=plan.dtype, device=plan.device)
            tail[-1] = self._reduction.mark(plan.dtype)
            marks.append(tail)
        return marks

    def end(self, reduced: Sequence[torch.Tensor]) -> None:
        """It has reduced."""
        if self._reducer.hook is None:
            for plan, marks in zip(self._reducer.buckets.plan, reduced, strict=True):
                total = sum_of_step_marks(marks[-1:], self._reduction.group.size())
                if total is not None:
                    self._reduction.check_step(total, plan.dtype)
        self._close()

    def place(self, bucket: int, at: int) -> tuple[torch.Tensor, float]:
        """Where the graph makes a gradient, in the reducer's memory, and what it multiplies it by."""
        return self._dense(bucket).place(self._reduction, at)

    def send(self, bucket: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reduce a bucket of the graph's gradients in the reducer's memory."""
        sent = self._dense(bucket)
        flat = sent.take(self._reduction, gradients)
        sent.launch(self._reduction)
        return flat

    def _dense(self, bucket: int) -> DenseBucket:
        found = self._reducer.buckets.buckets[bucket]
        if not isinstance(found, DenseBucket):
            raise InternalError("a graph sent gradients to a bucket of sparse ones")
        return found

    def receive(self) -> None:
        """Wait for what was sent."""
        for bucket in self._reducer.buckets.buckets:
            bucket.finish(self._reduction)
        self._close()

    def open(self, order: Sequence[int]) -> None:
        """The graph of a backward begins to reduce, in the reducer's memory."""
        reducer = self._reducer
        reducer.check_whole()
        reducer.num_begun += 1
        reducer.expected.graph_backward = current_backward()
        self._begun = reducer.make_reduction()
        self._order = order

    @property
    def _reduction(self) -> Reduction:
        if self._begun is None:
            raise InternalError("a graph goes on with a reduction that it has not begun")
        return self._begun

    def _close(self) -> None:
        reducer = self._reducer
        if reducer.hook is not None:
            agree_on_used([True] * len(self.params), self._reduction, self.params[0].device)
        self._begun = None
        expected, before = reducer.expected, reducer.buckets
        expected.is_open = expected.graph_backward is not None  # else autograd hands over nothing
        reducer.end_in_graph(self._order)
        if reducer.buckets is not before:
            self.refresh()

    def leave(self) -> None:
        """A graph has gradients of the module and doesn't reduce them."""
        self._reducer.expected.has_left = True

    def reduce_one(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """The mean of one gradient, by the module's hook if it has one."""
        reducer = self._reducer
        reducer.expected.has_unsynced = reducer.expected.has_left = False
        self._check_same(index)
        if reducer.hook is None:
            return comm.all_reduce(
                gradient * (1.0 / reducer.group.size()),
                group=reducer.group,
                feature=FEATURE,
                label=reducer.members[index].spec.name,
            ).wait()
        flat = gradient.reshape(-1).clone()
        bucket = GradBucket(index, flat, [self.params[index]], is_last=index == 0)
        bucket.label = reducer.members[index].spec.name
        mean = only_tensor(call_hook(reducer.make_reduction(), bucket).wait())
        return mean.reshape(gradient.shape).to(gradient.dtype)

    def _check_same(self, index: int) -> None:
        """Raise where ranks reduce gradients of different parameters, which nothing else would tell."""
        extremes = torch.tensor([index, -index], device=self.params[index].device)
        group = self._reducer.group
        highest, lowest = comm.all_reduce(extremes, ReduceOp.MAX, group, feature=FEATURE).wait().tolist()
        if highest != -lowest:
            name = self._reducer.members[index].spec.name
            state = state_of(group)
            raise DesyncError(
                f"rank {state.global_rank}: the ranks of {state.words()} reduce gradients of different "
                f"parameters in a backward that compiled autograd has traced: here it is '{name}'. Ranks "
                "have used different parameters. Run such backwards without compiled autograd."
            )


def _make_arrival(expected: Expectation) -> Callable[[torch.Tensor, int], None]:
    """What compiled autograd traces where a gradient arrives."""

    def arrive(param: torch.Tensor, index: int) -> None:
        if not expected.is_open or param.grad is None:
            return
        if expected.is_synced:
            param.grad = torch.ops.weft.reduce_gradient(param.grad, expected.owner, index, expected.wire)
        else:
            expected.has_unsynced = True

    return arrive


def _later(ref: weakref.ref[GraphSide], method: Callable[[GraphSide], None]) -> Callable[[Any], None]:
    """A function for `at_trace` that doesn't keep the object alive."""

    def run(_: Any) -> None:
        side = ref()
        if side is not None:
            method(side)

    return run
