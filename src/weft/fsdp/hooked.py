"""Reduce a batch with a gradient hook, the same that reduces data parallel's buckets.

The bucket has a part for each rank of the shards' group, with that rank's pieces of the gradients, and says
which part this rank wants. A hook that can reduces that part only; of any other's result the part is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft import comm
from weft.comm.call import hosted_by
from weft.comm.record import stand_for
from weft.comm_hooks import Chain, debugging_hooks
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.hook_check import check_hook
from weft.comm_hooks.mean import only_tensor
from weft.errors import ConfigError, StateError
from weft.fsdp.storage import is_cheap
from weft.tensors import use_count

if TYPE_CHECKING:
    from weft.fsdp.mesh import DataMesh
    from weft.fsdp.reduce import Batch


def reduce_with_hook(
    batch: Batch, grads: Sequence[torch.Tensor | None], out: torch.Tensor, which: tuple[int, str]
) -> None:
    """Fill `out` with this rank's part of what the registered hook makes of the gradients.

    `which` are the batch's index and its group's name.
    """
    batch.settings.comm_hook.reduce(batch, grads, out, which)


class RegisteredHook:
    """A hook and its state, for the groups that one `register_comm_hook` has covered."""

    def __init__(self, hook: GradHook, state: Any, num_batches: int) -> None:
        self._hook = hook
        self._state = state
        self._steps = Steps(num_batches)
        self._layouts: weakref.WeakKeyDictionary[Batch, Layout] = weakref.WeakKeyDictionary()
        self._room = Room()

    @torch.no_grad()
    def reduce(
        self, batch: Batch, grads: Sequence[torch.Tensor | None], out: torch.Tensor, which: tuple[int, str]
    ) -> None:
        """Fill `out` with this rank's part of what the hook makes of the gradients.

        Waits for it: a hook may use the group from a thread of its own, which nobody else may do meanwhile.
        """
        index, name = which
        layout = self._layouts.get(batch)
        if layout is None:
            layout = self._layouts[batch] = plan_layout(batch)
        buffer = self._room.take(layout.num_ranks * layout.part_numel, out, batch.data)
        rows = buffer.view(layout.num_ranks, layout.part_numel)
        spread = batch.spread
        for grad, start, piece in zip(grads, spread.shard_starts, spread.piece_numels, strict=True):
            if grad is None:
                rows[:, start : start + piece].zero_()
            elif piece:
                fill_rows(rows, grad.reshape(-1), start, piece)
        bucket = GradBucket(
            index,
            buffer,
            layout.stand_ins,
            layout.offsets,
            is_last=self._steps.is_last(index),
            wanted=(batch.data.shard_rank, layout.num_ranks),
            sharers=layout.sharers,
        )
        bucket.label = name
        with hosted_by("fsdp"):
            future = self._hook(self._state, bucket)
        mean = only_tensor(stand_for(name, batch.data.groups[0], future.wait))
        if mean.layout is not torch.strided or mean.numel() != buffer.numel():
            raise StateError(
                f"a gradient hook's future must bring a tensor like the bucket's buffer, of {buffer.numel()} "
                f"numbers; it brought one of {mean.numel()} ({mean.layout})."
            )
        out.copy_(mean.reshape(rows.shape)[batch.data.shard_rank])
        factor = batch.settings.divide_factor
        if factor is not None:  # of the sum, and the hook gives a mean
            out.mul_(batch.data.shard_size * batch.data.replicate_size / factor)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the bucket of a batch looks like."""

    num_ranks: int
    part_numel: int
    sharers: tuple[int, ...]
    stand_ins: list[torch.Tensor]  # of each rank's full pieces, part by part
    offsets: list[int]  # of those


def plan_layout(batch: Batch) -> Layout:
    """A part for each rank that the parameters are sharded over."""
    spread, group, num_ranks = batch.spread, batch.data.shard_group, batch.data.shard_size
    return Layout(
        num_ranks,
        spread.shard_numel,
        (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group)),
        batch.piece_shapes() * num_ranks,
        [rank * spread.shard_numel + start for rank in range(num_ranks) for start in spread.shard_starts],
    )


class Room:
    """Memory for buckets, one after another: on a CPU that of the largest one is kept.

    Fresh memory costs a CPU more than the copy that fills it. On other devices torch's allocator keeps it,
    for everyone.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, tuple[torch.Tensor, int]] = {}

    def take(self, numel: int, like: torch.Tensor, data: DataMesh) -> torch.Tensor:
        """A flat tensor with anything in it, that nobody else has: not even a hook that has kept a bucket."""
        if is_cheap(like.device):
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        kept, fresh_count = self._kept.get(like.dtype, (None, 0))
        if kept is None or kept.numel() < numel or use_count(kept) > fresh_count:
            kept = comm.allocate((numel,), like.dtype, like.device, data.groups[0])
            self._kept[like.dtype] = kept, use_count(kept)
        return kept[:numel]


class Steps:
    """Tells which bucket is the last of a backward, by what was seen so far, which is the same on every rank.

    At first every batch is expected, then as many as in the backward before. A backward has ended when a
    bucket comes again; one with fewer buckets than the one before has no last one.
    """

    def __init__(self, num_expected: int) -> None:
        self._num_expected = num_expected
        self._seen: set[int] = set()

    def is_last(self, index: int) -> bool:
        """Whether the bucket with this index, which comes now, is the last."""
        if index in self._seen:
            self._num_expected = len(self._seen)
            self._seen.clear()
        self._seen.add(index)
        return len(self._seen) == self._num_expected


def fill_rows(rows: torch.Tensor, flat: torch.Tensor, start: int, piece: int) -> None:
    """Put the pieces of one gradient where each rank's part has room for them, zeros where it is shorter."""
    num_full, num_rest = divmod(flat.numel(), piece)
    if num_full:
        rows[:num_full, start : start + piece].copy_(flat[: num_full * piece].view(num_full, piece))
    if num_full < len(rows):
        rows[num_full, start : start + num_rest].copy_(flat[num_full * piece :])
        rows[num_full, start + num_rest : start + piece].zero_()
        rows[num_full + 1 :, start : start + piece].zero_()


def register_hook(hook: GradHook, state: Any, meshes: Sequence[DataMesh], num_batches: int) -> RegisteredHook:
    """Check a hook for parameters on these meshes. Raises ConfigError for what can't give their mean."""
    check_hook(hook)
    ranks = {tuple(data.mesh.mesh.flatten().tolist()): data for data in meshes}
    by_group = {tuple(map(_ranks_of, data.groups)) for data in meshes}
    if len(by_group) > 1:
        raise ConfigError(
            f"register_comm_hook: the parameters of this module are on several meshes, {sorted(ranks)}, and "
            "the buckets of different meshes come in no common order. Register a hook, with a state of its "
            "own, on the modules of each mesh: with recurse=False where one contains modules of another."
        )
    for shared_by in ranks:
        if len(shared_by) == dist.get_world_size():
            continue
        for name in _worldwide(state, hook):
            raise ConfigError(
                f"register_comm_hook: {name} without a group averages over the whole world of "
                f"{dist.get_world_size()} ranks, and these parameters are shared by ranks {list(shared_by)} "
                "only. Give it their group as its state (or in its state, or in the chain, as `(group, "
                "hook)`): mesh.get_group() if the mesh has one axis, else torch.distributed.new_group(ranks)."
            )
    return RegisteredHook(hook, state, num_batches)


def _worldwide(state: Any, hook: Any) -> Iterator[str]:
    """The hooks that take the whole world for lack of a group."""
    if isinstance(hook, Chain):
        for stage_state, stage in hook.calls():
            yield from _worldwide(stage_state, stage)
    elif hook is not debugging_hooks.noop_hook and getattr(state, "process_group", state) is None:
        yield getattr(hook, "__qualname__", repr(hook))


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
