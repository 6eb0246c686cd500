"""Reduce a bucket with a communication hook, the same that reduces data parallel's buckets.

The hook's bucket has a part for each rank of the shard group, with that rank's shards of the gradients, and
says which part this rank wants. A hook that can reduces that part only; of any other's result it is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from weft.fsdp.all_gather import reallocates_cheaply
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.fsdp.reduce import Grads, ReduceBucket, copy_to_rows
from weft.tensors import use_count


@dataclass(frozen=True, slots=True)
class HookBucketLayout:
    """Where the gradients of a bucket lie in the buffer that the hook gets."""

    num_ranks: int
    part_numel: int
    sharers: tuple[int, ...]
    stand_ins: list[torch.Tensor]  # of each rank's padded shards, part by part: shapes without memory
    offsets: list[int]  # of those


class RegisteredCommHook:
    """A hook and its state, for the groups that one `register_comm_hook` has covered."""

    def __init__(self, hook: GradHook, state: Any, num_buckets: int) -> None:
        self._hook = hook
        self._state = state
        self._last_bucket = LastBucket(num_buckets)
        self._layouts: weakref.WeakKeyDictionary[ReduceBucket, HookBucketLayout] = weakref.WeakKeyDictionary()
        self._memory = HookBucketMemory()

    @torch.no_grad()
    def reduce(self, bucket: ReduceBucket, grads: Grads, out: torch.Tensor, index: int, name: str) -> None:
        """Fill `out` with this rank's part of the hook's result. `index` and `name` identify the bucket.

        Waits for the hook: it may use the group from a thread of its own, which nobody else may do meanwhile.
        """
        layout = self._layouts.get(bucket)
        if layout is None:
            layout = self._layouts[bucket] = plan_hook_bucket(bucket)
        mesh = bucket.dp_mesh
        buffer = self._memory.take(layout.num_ranks * layout.part_numel, out, mesh)
        rows = buffer.view(layout.num_ranks, layout.part_numel)
        spread = bucket.spread
        for grad, start, chunk in zip(grads, spread.shard_starts, spread.piece_numels, strict=True):
            if grad is None:
                rows[:, start : start + chunk].zero_()
            elif chunk:
                copy_to_rows(rows, grad.reshape(-1), start, chunk)
        hook_bucket = GradBucket(
            index,
            buffer,
            layout.stand_ins,
            layout.offsets,
            is_last=self._last_bucket.is_last(index),
            wanted=(mesh.shard_rank, layout.num_ranks),
            sharers=layout.sharers,
        )
        hook_bucket.label = name
        with hosted_by(FEATURE):  # the wait too: callbacks of a future may run in it
            future = self._hook(self._state, hook_bucket)
            mean = only_tensor(stand_for(name, mesh.groups[0], future.wait))
        if mean.layout is not torch.strided or mean.numel() != buffer.numel():
            raise StateError(
                f"a gradient hook's future must bring a tensor like the bucket's buffer, of {buffer.numel()} "
                f"numbers; it brought one of {mean.numel()} ({mean.layout})."
            )
        out.copy_(mean.reshape(rows.shape)[mesh.shard_rank])
        factor = bucket.settings.gradient_divide_factor
        if factor is not None:  # of the sum, and the hook gives a mean
            out.mul_(mesh.shard_size * mesh.replicate_size / factor)


def plan_hook_bucket(bucket: ReduceBucket) -> HookBucketLayout:
    """One part for each rank of the shard group."""
    spread, group, num_ranks = bucket.spread, bucket.dp_mesh.shard_group, bucket.dp_mesh.shard_size
    stand_ins = [torch.empty(param.layout.padded_shard_shape, device="meta") for param in bucket.params]
    return HookBucketLayout(
        num_ranks,
        spread.shard_numel,
        (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group)),
        stand_ins * num_ranks,
        [rank * spread.shard_numel + start for rank in range(num_ranks) for start in spread.shard_starts],
    )


class HookBucketMemory:
    """Memory for one hook bucket after the other: on a CPU that of the largest one is kept.

    New memory costs a CPU more than the copy that fills it. On other devices torch's allocator keeps it, for
    everyone.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, tuple[torch.Tensor, int]] = {}

    def take(self, numel: int, like: torch.Tensor, dp_mesh: DataParallelMesh) -> torch.Tensor:
        """A flat tensor of undefined values that nobody else holds, not even a hook that kept a bucket."""
        if reallocates_cheaply(like.device):
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        kept, count_unheld = self._kept.get(like.dtype, (None, 0))
        if kept is None or kept.numel() < numel or use_count(kept) > count_unheld:
            kept = comm.allocate((numel,), like.dtype, like.device, dp_mesh.groups[0])
            self._kept[like.dtype] = kept, use_count(kept)
        return kept[:numel]


class LastBucket:
    """Predicts which bucket is the last of a backward from those before, which are the same on every rank.

    At first every bucket is expected, then as many as in the backward before. A backward has ended when a
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


def make_comm_hook(
    hook: GradHook, state: Any, meshes: Sequence[DataParallelMesh], num_buckets: int
) -> RegisteredCommHook:
    """Check a hook for parameters on these meshes. Raises ConfigError for what can't give their mean."""
    check_hook(hook)
    ranks = {tuple(mesh.mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    by_group = {tuple(map(_ranks_of, mesh.groups)) for mesh in meshes}
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
    return RegisteredCommHook(hook, state, num_buckets)


def _worldwide(state: Any, hook: Any) -> Iterator[str]:
    """The hooks that average over the world for lack of a group."""
    if isinstance(hook, Chain):
        for stage_state, stage in hook.calls():
            yield from _worldwide(stage_state, stage)
    elif hook is not debugging_hooks.noop_hook and getattr(state, "process_group", state) is None:
        yield getattr(hook, "__qualname__", repr(hook))


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
