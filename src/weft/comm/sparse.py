"""All-reduce of sparse tensors on groups that have none: gather everyone's entries and add them up.

nccl is such a group. gloo and the local group do it themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.comm.handle import Handle

    Gather = Callable[[torch.Tensor, torch.Tensor], Handle[torch.Tensor]]


def needs_gathering(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether the group can't reduce this sparse tensor itself."""
    return tensor.is_cuda and getattr(group, "allocate", None) is None


def sum_by_gathering(tensor: torch.Tensor, num_ranks: int, gather: Gather) -> Handle[torch.Tensor]:
    """A handle of the sum over all ranks, into the tensor. `gather(out, mine)` fills `out` from all ranks.

    Ranks may have different numbers of entries: each sends as many as the one with the most.
    """
    mine = tensor.detach().coalesce()
    num_mine = mine._nnz()
    counts = torch.empty(num_ranks, dtype=torch.int64, device=mine.device)
    gather(counts, torch.tensor([num_mine], device=mine.device)).wait()
    most = max(int(counts.max()), 1)
    indices = mine.indices().new_zeros((most, mine.sparse_dim()))
    values = mine.values().new_zeros((most, *mine.values().shape[1:]))
    indices[:num_mine] = mine.indices().t()
    values[:num_mine] = mine.values()
    all_indices = indices.new_empty((num_ranks * most, *indices.shape[1:]))
    all_values = values.new_empty((num_ranks * most, *values.shape[1:]))
    gather(all_indices, indices).wait()

    def add_up(_: torch.Tensor) -> torch.Tensor:
        is_entry = (torch.arange(most, device=mine.device) < counts.unsqueeze(1)).view(-1)  # not padding
        total = torch.sparse_coo_tensor(
            all_indices[is_entry].t(), all_values[is_entry], mine.shape, check_invariants=False
        )
        with torch.no_grad():
            return tensor.copy_(total.coalesce())

    return gather(all_values, values).then(add_up)
