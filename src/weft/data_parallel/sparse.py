"""The mean of sparse gradients over a group."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from weft import comm

FEATURE = "ddp"


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
