"""All buckets of a plan, and the agreements about them that ranks reach with messages of their own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm.graph_capture import check_host_read, is_capturing
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.buckets import Bucket, Reduction, launch_plain, wait_for
from weft.data_parallel.dense import DenseBucket
from weft.data_parallel.flat_gradients import check_used
from weft.data_parallel.members import Member
from weft.data_parallel.plan import BucketCaps, BucketPlan, plan_buckets
from weft.data_parallel.sparse import SparseBucket
from weft.tensors import grads_of


class BucketSet:
    """The buckets for parameters whose gradients come in this order. It never changes; its buffers do."""

    def __init__(
        self,
        members: Sequence[Member],
        order: Sequence[int],
        caps: BucketCaps,
        *,
        keeps_buffers: bool,
        is_greedy: bool = False,
    ) -> None:
        self.order = list(order)
        specs = [member.spec for member in members]
        self.plan: tuple[BucketPlan, ...] = plan_buckets(specs, order, caps, is_greedy=is_greedy)
        self.buckets: list[Bucket] = []
        self.bucket_of = [0] * len(members)  # by parameter
        self.ids = [frozenset(id(members[index].param) for index in plan.params) for plan in self.plan]
        for number, plan in enumerate(self.plan):
            is_last = number == len(self.plan) - 1
            inside = [members[index] for index in plan.params]
            if plan.is_sparse:
                self.buckets.append(SparseBucket(plan, inside, number, is_last=is_last))
            else:
                self.buckets.append(
                    DenseBucket(plan, inside, number, is_last=is_last, keeps_buffer=keeps_buffers)
                )
            for index in plan.params:
                self.bucket_of[index] = number

    def renew(self) -> None:
        """Let the next gradients have memory of their own."""
        for bucket in self.buckets:
            bucket.renew()

    def count_expected(self, expected: Sequence[int]) -> list[int]:
        """How many gradients each bucket waits for, from how many each parameter gets."""
        return [sum(expected[index] for index in plan.params) for plan in self.plan]

    def find_held(self, params: Sequence[torch.Tensor], *, is_filled: bool) -> list[dict[int, torch.Tensor]]:
        """Gradients that are there and are not ours, by bucket and place: the user's, to be filled if so."""
        held: list[dict[int, torch.Tensor]] = [{} for _ in self.buckets]
        if not is_filled or {*map(type, grads_of(params))} == {type(None)}:
            return held
        for bucket, found in zip(self.buckets, held, strict=True):
            for at, index in enumerate(bucket.plan.params):
                grad = params[index].grad
                if grad is not None and not bucket.owns(at, grad):
                    found[at] = grad
        return held

    def find_used(self) -> list[bool]:
        """By parameter, whether this rank has used it. Known when all buckets have collected."""
        used = [False] * len(self.bucket_of)
        for bucket in self.buckets:
            for index, is_used in zip(bucket.plan.params, bucket.used, strict=True):
                used[index] = is_used
        return used

    def find_last(self, arrivals: Sequence[int]) -> set[int]:
        """The parameter of each bucket that came last; of a bucket without arrivals, any."""
        last = {number: plan.params[-1] for number, plan in enumerate(self.plan)}
        for index in arrivals:
            last[self.bucket_of[index]] = index
        return set(last.values())


_numbers: weakref.WeakKeyDictionary[ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def numbers_of(group: ProcessGroup) -> Iterator[int]:
    """Numbers for the reducers of a group, in the order in which they are made, the same on all ranks."""
    return _numbers.setdefault(group, itertools.count())


def agree_on_order(
    arrivals: Sequence[int], before: Sequence[int], group: ProcessGroup, device: torch.device
) -> list[int]:
    """The first rank's order of arrival, for all; what never came there goes last, as it stood before."""
    check_host_read(
        device,
        "the buckets of DDP or replicate are planned anew after the first step",
        "Make at least two steps before you capture one.",
    )
    came = list(dict.fromkeys(arrivals))
    missing = sorted(set(before) - set(came), key=list(before).index)
    order = torch.tensor([*came, *missing], device=device)
    if group.size() > 1:
        first = state_of(group).ranks[0]
        wait_for(
            launch_plain(
                group,
                order,
                lambda: comm.broadcast(order, first, group, feature=FEATURE, label="bucket order"),
            )
        )
    return order.tolist()


def agree_on_used(is_used: Sequence[bool], reduction: Reduction, device: torch.device) -> list[bool]:
    """Which parameters some rank has used. For hooks, whose buffers can't carry the marks."""
    group = reduction.group
    if group.size() == 1 or (all(is_used) and is_capturing(device)):
        return list(is_used)
    check_used(device)
    own = [*is_used, reduction.mark(torch.int32)]
    marks = torch.tensor(own, dtype=torch.int32, device=device)
    pending = launch_plain(
        group, marks, lambda: comm.all_reduce(marks, group=group, feature=FEATURE, label="used parameters")
    )
    *used, total = wait_for(pending).tolist()
    reduction.check_step(total, torch.int32)
    return [count > 0 for count in used]
