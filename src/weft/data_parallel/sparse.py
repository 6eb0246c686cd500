"""A bucket with the sparse gradient of one parameter, and the mean of such over a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.data_parallel.buckets import FEATURE, Bucket, Member, Reduction, launch_plain
from weft.data_parallel.plan import BucketPlan
from weft.errors import InternalError


class SparseBucket(Bucket):
    """One parameter with sparse gradients, which travel as entries."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], index: int, *, is_last: bool) -> None:
        super().__init__(plan, members, index, is_last=is_last)
        self._param = members[0].param
        self._grad = torch.empty(0)

    @torch.no_grad()
    def collect(self, reduction: Reduction, used: Sequence[bool] | None) -> None:
        grad = self._param.grad
        self.used = (grad is not None,) if used is None else used
        if grad is None:
            self._grad = no_entries(self._param)
        else:
            self._grad = (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce()

    def launch(self, reduction: Reduction) -> None:
        grad, group = self._grad, reduction.group
        if reduction.hook is not None:
            self._pending = self._call_hook(reduction, grad)
        else:
            self._pending = launch_plain(group, grad, lambda: mean_sparse(grad, reduction.divisor, group))

    def finish(self, reduction: Reduction) -> None:
        mean = self._wait()
        if mean is None:
            raise InternalError("a sparse bucket was to finish before it was launched")
        self._grad = mean

    @torch.no_grad()
    def hand_out(
        self, held: Mapping[int, torch.Tensor], used_anywhere: Sequence[bool] | None
    ) -> Sequence[bool]:
        mean, self._grad = self._grad, torch.empty(0)
        is_used = self.used if used_anywhere is None else used_anywhere
        if not is_used[0] and mean.is_sparse and mean._nnz() == 0:
            return (False,)
        grad = self._param.grad
        if grad is not None and held.get(0) is grad:
            grad.copy_(mean)
        else:
            self._param.grad = mean.to_dense() if grad is not None and not grad.is_sparse else mean
        return (True,)

    def owns(self, at: int, grad: torch.Tensor) -> bool:
        return grad.is_sparse  # made anew in each step


def no_entries(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of zero, for a parameter whose rows have gradients."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()


def mean_sparse(grad: torch.Tensor, divisor: int, group: ProcessGroup) -> comm.Handle[torch.Tensor]:
    """Sum a coalesced sparse tensor over the group and divide it. The entries of ranks may differ."""
    with torch.no_grad():
        part = grad / divisor
    if group.name() == "nccl" or (grad.is_cuda and getattr(group, "allocate", None) is None):
        return _mean_by_gathering(part, group)
    return comm.all_reduce(part, group=group, feature=FEATURE)


def _mean_by_gathering(part: torch.Tensor, group: ProcessGroup) -> comm.Handle[torch.Tensor]:
    """For groups without a sparse all-reduce: gather everyone's entries, padded to the most."""
    part = part.coalesce()
    num_entries = torch.tensor([part._nnz()], device=part.device)
    counts = torch.empty(group.size(), dtype=torch.int64, device=part.device)
    comm.all_gather_into_tensor(counts, num_entries, group, feature=FEATURE).wait()
    most = max(int(counts.max()), 1)
    indices = part.indices().new_zeros((most, part.sparse_dim()))
    values = part.values().new_zeros((most, *part.values().shape[1:]))
    indices[: part._nnz()] = part.indices().t()
    values[: part._nnz()] = part.values()
    all_indices = indices.new_empty((group.size() * most, part.sparse_dim()))
    all_values = values.new_empty((group.size() * most, *values.shape[1:]))
    comm.all_gather_into_tensor(all_indices, indices, group, feature=FEATURE).wait()
    gathered = comm.all_gather_into_tensor(all_values, values, group, feature=FEATURE)

    # Padding adds zeros to the first row; that entry may not have been there, so cut it off.
    def add_up(_: torch.Tensor) -> torch.Tensor:
        kept = (torch.arange(most, device=part.device).unsqueeze(0) < counts.unsqueeze(1)).view(-1)
        return torch.sparse_coo_tensor(
            all_indices[kept].t(), all_values[kept], part.shape, check_invariants=False
        ).coalesce()

    return gathered.then(add_up)
