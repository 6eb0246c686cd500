"""Which buckets a reducer has now: by the order of parameters, later by that in which gradients came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from weft.data_parallel.bucket_set import BucketSet, agree_on_order
from weft.data_parallel.members import Member
from weft.data_parallel.plan import BucketCaps, follows


class BucketPlans:
    """The plan in force. It changes once, when all ranks take over the first one's order of arrival."""

    def __init__(self, members: Sequence[Member], caps: BucketCaps, *, keeps_buffers: bool) -> None:
        self._members = members
        self.caps = caps
        self.keeps_buffers = keeps_buffers
        self.is_greedy = False  # buckets are filled to their caps
        self.start_over()

    def start_over(self) -> None:
        """Plan as if nothing was known."""
        self.is_learned = False
        # Gradients come in about the reverse of the order in which parameters were made.
        self._adopt(list(reversed(range(len(self._members)))))

    def _adopt(self, order: Sequence[int]) -> None:
        self.buckets = BucketSet(
            self._members, order, self.caps, keeps_buffers=self.keeps_buffers, is_greedy=self.is_greedy
        )

    def replan(self, caps: BucketCaps, *, is_greedy: bool) -> None:
        """Go on with buckets of these sizes, as all ranks do."""
        if (caps, is_greedy) != (self.caps, self.is_greedy):
            self.caps, self.is_greedy = caps, is_greedy
            self._adopt(self.buckets.order)

    def learn(self, order: Sequence[int] | None, group: ProcessGroup, device: torch.device) -> None:
        """After the first reduction: take the order of arrival on the group's first rank. All ranks call it.

        Without an order, or with one that the buckets follow well enough, a rank proposes what there is: a
        graph that was compiled for it needn't be compiled again.
        """
        if self.is_learned:
            return
        self.is_learned = True
        before = self.buckets.order
        self._adopt(agree_on_order(before if order is None else order, before, group, device))

    def learn_from_graph(self, order: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        """The same where a graph has made the gradients, in this order."""
        self.learn(None if follows(self.buckets.plan, order) else order, group, device)

    def renew(self) -> None:
        """Let the next gradients have memory of their own, where it is kept otherwise."""
        if self.keeps_buffers:
            self.buckets.renew()
