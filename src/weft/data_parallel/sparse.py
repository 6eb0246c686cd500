"""A bucket with the sparse gradient of one parameter, and the mean of such over a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.buckets import Bucket, Reduction, launch_plain
from weft.data_parallel.members import Member
from weft.data_parallel.plan import BucketPlan
from weft.errors import InternalError


class SparseBucket(Bucket):
    """One parameter with sparse gradients, which travel as entries."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool) -> None:
        super().__init__(plan, members, index, is_last=is_last)
        self._param = members[0].param
        self._grad = torch.empty(0)
        self._held: torch.Tensor | None = None  # the user's own, which the mean is copied into

    @torch.no_grad()
    def collect(
        self, reduction: Reduction, used: Sequence[bool] | None, held: Mapping[int, torch.Tensor]
    ) -> None:
        grad = self._param.grad
        self.used = (grad is not None,) if used is None else used
        self._held = held.get(0)
        if grad is None:
            self._grad = no_entries(self._param)
        else:
            self._grad = (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce()

    def launch(self, reduction: Reduction) -> None:
        grad, group = self._grad, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, grad)
        else:
            self._pending = launch_plain(
                group, grad, lambda: mean_sparse(grad, reduction.divisor, group, self._label)
            )

    def finish(self, reduction: Reduction) -> None:
        mean = self._wait(reduction.group)
        if mean is None:
            raise InternalError("a sparse bucket was to finish before it was launched")
        self._grad = mean

    @torch.no_grad()
    def hand_out(self, used_anywhere: Sequence[bool] | None) -> Sequence[bool]:
        mean, self._grad = self._grad, torch.empty(0)
        is_used = self.used if used_anywhere is None else used_anywhere
        if not is_used[0] and mean.is_sparse and mean._nnz() == 0:
            return (False,)
        grad = self._param.grad
        if grad is not None and self._held is grad:
            grad.copy_(mean if grad.is_sparse else mean.to_dense())
        else:
            self._param.grad = mean.to_dense() if grad is not None and not grad.is_sparse else mean
        return (True,)

    def renew(self) -> None:
        """Nothing: its memory is each step's own."""

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return grad.is_sparse  # made anew in each step


def no_entries(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of zero, for a parameter whose rows have gradients."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()


def mean_sparse(
    grad: torch.Tensor, divisor: int, group: ProcessGroup, label: str = ""
) -> comm.Handle[torch.Tensor]:
    """Sum a coalesced sparse tensor over the group and divide it. The entries of ranks may differ."""
    with torch.no_grad():
        part = grad / divisor
    return comm.all_reduce(part, group=group, feature=FEATURE, label=label)
