"""What ranks must agree on before they train together: the same parameters, the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.plan import MB, ParamSpec
from weft.errors import DesyncError
from weft.tensors import batch_by_dtype, copy_all

BROADCAST_BYTES = 250 * MB


def check_same_model(specs: Sequence[ParamSpec], group: ProcessGroup) -> None:
    """Raise on every rank, with the first difference, where ranks bring different parameters."""
    if group.size() == 1:
        return
    lines = [_describe(spec) for spec in specs]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=specs[0].device)
    gathered = torch.empty(group.size() * len(digest), dtype=torch.uint8, device=specs[0].device)
    comm.all_gather_into_tensor(gathered, mine, group, feature=FEATURE).wait()
    digests = gathered.view(group.size(), -1)
    if bool((digests == digests[0]).all()):
        return
    everyone: list[list[str]] = comm.all_gather_object(lines, group, feature=FEATURE).wait()
    ranks = state_of(group).ranks
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs != everyone[0]:
            raise DesyncError(_first_difference(ranks[0], everyone[0], rank, theirs), (rank,))


def _describe(spec: ParamSpec) -> str:
    kind = " with sparse gradients" if spec.is_sparse else f", {spec.piece}" if spec.piece else ""
    return f"'{spec.name}' of shape {list(spec.shape)}, {str(spec.dtype).removeprefix('torch.')}{kind}"


def _first_difference(first: int, ours: list[str], rank: int, theirs: list[str]) -> str:
    if len(ours) != len(theirs):
        head = (
            f"DDP expects same model across all ranks, but Rank {rank} has {len(theirs)} params, "
            f"while rank {first} has inconsistent {len(ours)} params"
        )
    else:
        head = "DDP expects same model across all ranks, but parameters differ"
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            found = f"params[{at}] is {one} on rank {first} and {other} on rank {rank}"
            break
    else:
        at = min(len(ours), len(theirs))
        longer, which = (theirs, rank) if len(theirs) > len(ours) else (ours, first)
        found = f"params[{at}] is there on rank {which} only: {longer[at]}"
    return (
        f"{head}. The first difference: {found}, which appears not to match. Build the same module on "
        "every rank."
    )


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor],
    src: int,
    group: ProcessGroup,
    label: str,
    limit_bytes: int = BROADCAST_BYTES,
) -> None:
    """Give every rank the values of rank `src` of the group, in few flat messages."""
    root = state_of(group).ranks[src]
    is_root = state_of(group).rank == src
    for batch in batch_by_dtype((tensor.detach() for tensor in tensors), limit_bytes):
        if len(batch) == 1 and batch[0].is_contiguous():
            comm.broadcast(batch[0], root, group, feature=FEATURE, label=label).wait()
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in batch])
        comm.broadcast(flat, root, group, feature=FEATURE, label=label).wait()
        if not is_root:
            parts = flat.split([tensor.numel() for tensor in batch])
            copy_all(batch, [part.view(one.shape) for part, one in zip(parts, batch, strict=True)])


def find_last(
    is_candidate: bool, group: ProcessGroup, device: torch.device, note: int = 0
) -> tuple[int, int]:
    """The highest rank of the group among the candidates (-1: none), and the largest note of a rank."""
    found = torch.tensor([state_of(group).rank if is_candidate else -1, note], device=device)
    comm.all_reduce(found, torch.distributed.ReduceOp.MAX, group, feature=FEATURE).wait()
    rank, largest = found.tolist()
    return int(rank), int(largest)
