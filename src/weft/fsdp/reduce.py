"""Gradients of whole parameters become sharded means.

A batch is what one collective carries: parameters of one dtype. Its reduction is launched in backward and
goes through stages while backward goes on: reduced over the shards' ranks, then over those that hold the same
shard, then divided, cast, and given to the parameters, whose hooks run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weft import comm
from weft.comm import Handle
from weft.comm.call import hosted_by
from weft.fsdp.division import Division, plan_division
from weft.fsdp.flat import FEATURE
from weft.fsdp.gradients import GradShards
from weft.fsdp.hooked import fill_rows, reduce_with_hook
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam, arranged_by_rank
from weft.fsdp.settings import Settings
from weft.fsdp.storage import allocate_storage, free_storage, is_cheap
from weft.fsdp.told import bits_of
from weft.fsdp.user_hooks import give_all, has_tensor_hooks
from weft.tensors import copy_all, plan_spread

Grads = Sequence[torch.Tensor | None]


class Receiver(Protocol):
    """The group whose gradients these are."""

    given: int

    def deliver(self, param: ShardedParam, grad: Any, had: bool) -> None:
        """Take a parameter's mean; `had`: this rank had a part in it."""
        ...


class Batch:
    """Parameters whose gradients one collective reduces."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        data: DataMesh,
        reduce_dtype: torch.dtype,
        settings: Settings,
        *,
        is_pinned: bool = False,
    ) -> None:
        self._is_pinned = is_pinned  # gradients, in the CPU's memory
        self.params = list(params)
        self.data = data
        self.settings = settings
        self.reduce_dtype = reduce_dtype
        self.dtype = params[0].dtype
        self.shard_device = params[0].local.device
        splits = [param.split for param in params]
        self.in_order = [split.is_in_order for split in splits]
        self.spread = plan_spread(
            [split.spread_numel for split in splits],
            [split.piece_numel for split in splits],
            data.shard_size,
        )
        self.partial: torch.Tensor | None = None  # reduced over the shards' ranks only
        self.partial_had = 0
        self._shards: GradShards | None = None
        self._wholes: list[Any] | None = None
        self._bits = self._first_bit = 0
        self._spare: torch.Tensor | None = None  # for sums that are only added to gradients

    def wholes(self) -> list[Any]:
        """The whole parameters, whose gradients these are."""
        if self._wholes is None or self._wholes[0] is not self.params[0].whole:
            self._wholes = [param.whole for param in self.params]
        return self._wholes

    def bits_of(self, grads: Grads) -> int:
        """A bit for each parameter that has a gradient."""
        if all(grad is not None for grad in grads):
            return self.all_bits()
        return bits_of(param.bit for param, grad in zip(self.params, grads, strict=True) if grad is not None)

    def partial_bits(self) -> int:
        """The same for what waits to be reduced over the replicas, if it is now."""
        if self.partial is None or not self.settings.reduces_replicas:
            return 0
        return bits_of(param.bit for at, param in enumerate(self.params) if self.partial_had >> at & 1)

    def take_partial(self) -> tuple[torch.Tensor | None, int]:
        """What waits to be reduced over the replicas, if it is now, and which parameters have a part in it.

        It goes with the reduction that is being launched: nothing waits any more, so nobody launches another.
        """
        if not self.settings.reduces_replicas:
            return None, 0
        taken = (self.partial, self.partial_had)
        self.partial, self.partial_had = None, 0
        return taken

    def all_bits(self) -> int:
        """A bit for each parameter."""
        if not self._bits or self._first_bit != self.params[0].bit:
            self._first_bit = self.params[0].bit
            self._bits = bits_of(param.bit for param in self.params)
        return self._bits

    def release(self) -> None:
        """Give back memory of gradients that nobody has, where it can be had again for little."""
        if self._shards is None or not is_cheap(self.data.device):
            return
        if not self._shards.is_held(self.params):
            free_storage(self._shards.flat)

    def piece_shapes(self) -> list[torch.Tensor]:
        """A stand-in for one rank's full piece of each parameter: its shape, without memory."""
        return [torch.empty(param.split.full_piece_shape, device="meta") for param in self.params]

    def division(self) -> Division:
        """How sums become means."""
        settings = self.settings
        if settings.comm_hook is not None:
            return Division(averages=True)  # the hook's work
        num_ranks = self.data.shard_size * self.data.replicate_size
        return plan_division(
            self.reduce_dtype, num_ranks, settings.divide_factor, sums_only=settings.sums_only
        )

    def room(self) -> GradShards:
        """Room for this step's gradients: last step's, if nobody has them any more."""
        if self._shards is not None and not self._shards.is_held(self.params):
            allocate_storage(self._shards.flat)
        else:
            flat = torch.zeros(
                self.spread.shard_numel,
                dtype=self.dtype,
                device=self.shard_device,
                pin_memory=self._is_pinned,
            )
            self._shards = GradShards(self.params, self.spread.shard_starts, flat)
        return self._shards

    def spare(self) -> torch.Tensor:
        """Room for sums that don't stay."""
        if self._spare is None:
            self._spare = torch.empty(
                self.spread.shard_numel, dtype=self.reduce_dtype, device=self.data.device
            )
        spare, self._spare = self._spare, None
        return spare

    def give_back(self, spare: torch.Tensor) -> None:
        """The sums in it have been used."""
        if not is_cheap(spare.device):
            self._spare = spare


class Reduction:
    """One batch's gradients on their way."""

    def __init__(self, batch: Batch, grads: Sequence[torch.Tensor | None], name: str, index: int) -> None:
        self._batch = batch
        self._name = name
        self._index = index
        self.had = [grad is not None for grad in grads]
        self._division = batch.division()
        self._shards = batch.room() if self._is_direct() else None
        self._out = batch.spare() if self._shards is None else self._shards.flat
        self._partial, self._partial_had = batch.take_partial()
        self._handle = self._launch(self._prepare(grads))
        self._is_scattered = False
        self.is_partial = False

    def _is_direct(self) -> bool:
        """Whether sums can be made right where the gradients shall be."""
        batch = self._batch
        return (
            batch.dtype == batch.reduce_dtype
            and batch.shard_device == batch.data.device
            and all(param.sharded.grad is None for param in batch.params)
            and batch.partial is None
            and (batch.data.replicate_group is None or batch.settings.reduces_replicas)
        )

    def _prepare(self, grads: Grads) -> Grads:
        """In the reduce dtype, by rank where the parameter's own order isn't so, divided where it must be."""
        batch = self._batch
        dtype = batch.reduce_dtype
        prepared = [grad if grad is None or grad.dtype == dtype else grad.to(dtype) for grad in grads]
        if not all(batch.in_order):
            for at, (grad, param) in enumerate(zip(prepared, batch.params, strict=True)):
                if grad is not None and not batch.in_order[at]:
                    prepared[at] = arranged_by_rank(grad, param.split)
        if self._division.before != 1.0:
            torch._foreach_div_([grad for grad in prepared if grad is not None], self._division.before)  # type: ignore[reportPrivateImportUsage]
        return prepared

    def _launch(self, grads: Grads) -> Handle[Any] | None:
        batch = self._batch
        settings = batch.settings
        if settings.comm_hook is not None:
            reduce_with_hook(batch, grads, self._out, (self._index, self._name))
            return None
        if batch.data.shard_size == 1:
            _pack(self._out, grads, batch.spread.shard_starts, batch.spread.numels)
            return None
        if settings.custom_reduce is not None:
            return self._launch_custom(grads)
        return comm.reduce_scatter_spread(
            self._out,
            grads,
            batch.spread,
            self._division.op,
            settings.reduce_group or batch.data.shard_group,
            feature=FEATURE,
            name=self._name,
        ).followed()

    def _launch_custom(self, grads: Grads) -> Handle[Any] | None:
        """Through the user's own reduce-scatter."""
        batch, custom = self._batch, self._batch.settings.custom_reduce
        num_ranks, numel = batch.data.shard_size, batch.spread.shard_numel
        packed = custom.allocate((num_ranks * numel,), dtype=batch.reduce_dtype, device=batch.data.device)
        packed.zero_()
        rows = packed.view(num_ranks, numel)
        for grad, at, piece in zip(grads, batch.spread.shard_starts, batch.spread.piece_numels, strict=True):
            if grad is not None and piece:
                fill_rows(rows, grad.reshape(-1), at, piece)
        work = custom(
            output_tensor=self._out,
            input_tensor=packed,
            group=batch.data.shard_group,
            op=self._division.op,
            async_op=False,
        )
        if work is not None:
            work.wait()
        return None

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of the gradients that go in, and of this rank's part of the mean."""
        spread, width = self._batch.spread, self._batch.reduce_dtype.itemsize
        return sum(spread.numels) * width, spread.shard_numel * width

    def start_replicas(self) -> None:
        """Begin the second stage, where there is one."""
        if self._batch.data.replicate_size > 1:
            self.finish_scatter()

    def finish_scatter(self) -> None:
        """The first stage's end: the shards' ranks have reduced. Starts the second."""
        if self._is_scattered:
            return
        self._is_scattered = True
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
        batch = self._batch
        if batch.data.replicate_group is None or batch.data.replicate_size == 1:
            return
        bits = sum(1 << at for at, had in enumerate(self.had) if had)
        if not batch.settings.reduces_replicas:
            # Kept until a backward that reduces all the way.
            batch.partial = self._out if batch.partial is None else batch.partial.add_(self._out)
            batch.partial_had |= bits
            self.is_partial = True
            return
        if self._partial is not None:
            self._out.add_(self._partial)
            self.had = [bool((self._partial_had | bits) >> at & 1) for at in range(len(self.had))]
            self._partial = None
        if batch.settings.comm_hook is None:
            self._handle = comm.all_reduce(
                self._out,
                self._division.op,
                batch.data.replicate_group,
                feature=FEATURE,
                label=self._name,
            ).followed()

    @torch.no_grad()
    def finish(self, group: Receiver, scale: float = 1.0) -> None:
        """The last stage: means are there, and the group's parameters get them."""
        self.finish_scatter()
        if self.is_partial:
            return
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        self._run_hook()
        if self._division.after != 1.0:
            self._out.div_(self._division.after)
        if scale != 1.0:
            self._out.mul_(scale)
        batch = self._batch
        if self._shards is not None:
            given: list[Any] = list(self._shards.wrappers)
        elif self._adds_in_place():
            self._add_all()
            given = [None] * len(batch.params)
        else:
            shards = batch.room()
            shards.flat.copy_(self._out)
            given = list(shards.wrappers)
        if self._shards is None:
            batch.give_back(self._out)
        if self._shards is not None and all(self.had) and give_all(batch.params, given):
            group.given |= batch.all_bits()
            return
        for param, grad, had in zip(batch.params, given, self.had, strict=True):
            group.deliver(param, grad, had)

    def drop(self) -> None:
        """Wait for what is under way; nobody wants it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _run_hook(self) -> None:
        settings = self._batch.settings
        if settings.all_reduce_hook is None:
            return
        stream = settings.all_reduce_stream
        if stream is None:
            with hosted_by("fsdp"):
                settings.all_reduce_hook(self._out)
            return
        on: Any = torch.get_device_module(self._batch.data.device)
        stream.wait_stream(on.current_stream())
        with on.stream(stream), hosted_by("fsdp"):
            settings.all_reduce_hook(self._out)
        on.current_stream().wait_stream(stream)

    def _adds_in_place(self) -> bool:
        """Whether every parameter has a gradient that these are simply added to."""
        batch = self._batch
        return (
            batch.dtype == batch.reduce_dtype
            and batch.shard_device == batch.data.device
            and all(self.had)
            and all(param.sharded.grad is not None and not has_tensor_hooks(param) for param in batch.params)
        )

    def _add_all(self) -> None:
        batch = self._batch
        targets = [param.sharded.grad._local_tensor.view(-1) for param in batch.params]  # type: ignore[union-attr]
        sources = [
            self._out[start : start + target.numel()]
            for start, target in zip(batch.spread.shard_starts, targets, strict=True)
        ]
        torch._foreach_add_(targets, sources)  # type: ignore[reportPrivateImportUsage]


@torch.no_grad()
def _pack(out: torch.Tensor, grads: Grads, starts: Sequence[int], numels: Sequence[int]) -> None:
    """Copy gradients into the flat buffer, where nothing is sharded."""
    if any(grad is None for grad in grads):
        out.zero_()
    pairs = [
        (out[start : start + numel], grad.reshape(-1))
        for grad, start, numel in zip(grads, starts, numels, strict=True)
        if grad is not None
    ]
    if pairs:
        copy_all([target for target, _ in pairs], [source for _, source in pairs])


def gradient_batches(
    params: Sequence[ShardedParam], dtype_of: Callable[[ShardedParam], torch.dtype]
) -> list[list[ShardedParam]]:
    """Trainable parameters by what one collective can carry."""
    batches: dict[tuple[torch.dtype, torch.dtype], list[ShardedParam]] = {}
    for param in params:
        if param.sharded.requires_grad:
            batches.setdefault((param.dtype, dtype_of(param)), []).append(param)
    return list(batches.values())
