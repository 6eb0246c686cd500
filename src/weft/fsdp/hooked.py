"""Reduce a batch with a gradient hook, the same that reduces data parallel's buckets.

The bucket has a part for each rank of the shards' group, with that rank's pieces of the gradients, and says which
part this rank wants. A hook that can reduces that part only; of any other's result the part is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.mean import settle

if TYPE_CHECKING:
    from weft.fsdp.reduce import Batch


@torch.no_grad()
def reduce_with_hook(
    batch: Batch, grads: Sequence[torch.Tensor | None], out: torch.Tensor, index: int
) -> None:
    """Fill `out` with this rank's part of what the hook makes of the gradients.

    Waits for it: a hook may use the group from a thread of its own, which nobody else may do meanwhile.
    """
    num_ranks, spread = batch.data.shard_size, batch.spread
    buffer = torch.zeros(num_ranks * spread.shard_numel, dtype=batch.reduce_dtype, device=batch.data.device)
    rows = buffer.view(num_ranks, spread.shard_numel)
    for grad, start, piece in zip(grads, spread.shard_starts, spread.piece_numels, strict=True):
        if grad is not None and piece:
            fill_rows(rows, grad.reshape(-1), start, piece)
    bucket = GradBucket(
        index,
        buffer,
        [part for _ in range(num_ranks) for part in batch.piece_shapes()],
        [rank * spread.shard_numel + start for rank in range(num_ranks) for start in spread.shard_starts],
        is_last=False,
        wanted=(batch.data.shard_rank, num_ranks),
    )
    settings = batch.settings
    settle(settings.comm_hook(settings.comm_hook_state, bucket).wait(), buffer)
    out.copy_(rows[batch.data.shard_rank])


def fill_rows(rows: torch.Tensor, flat: torch.Tensor, start: int, piece: int) -> None:
    """Put the pieces of one gradient where each rank's part has room for them."""
    num_full = flat.numel() // piece
    if num_full:
        rows[:num_full, start : start + piece].copy_(flat[: num_full * piece].view(num_full, piece))
    rest = flat[num_full * piece :]
    if rest.numel():
        rows[num_full, start : start + rest.numel()].copy_(rest)
