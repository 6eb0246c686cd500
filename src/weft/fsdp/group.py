"""A group of parameters that are gathered, freed and reduced together.

It is sharded, whole, or (between forward and backward) sharded over a smaller mesh; its modules have the
parameters that go with that. When it changes is the business of state.py; in which order it may use the
network, of conductor.py, which calls `launch_gather` and `launch_reduce`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weft.comm.record import note
from weft.errors import InternalError, UnsupportedError
from weft.fsdp.conductor import Conductor
from weft.fsdp.extension import ExtendedParam
from weft.fsdp.flat import FEATURE, FlatParams
from weft.fsdp.group_gradients import GroupGradients
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam, is_whole
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.settings import Settings


class Shown(Enum):
    """Which parameters the modules have."""

    SHARDED = 0
    WHOLE = 1
    SMALL = 2


class ParamGroup(GroupGradients):
    """What one call of fully_shard has put together."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        settings: Settings,
        shard_device: torch.device,
        *,
        is_pinned: bool = False,
    ) -> None:
        super().__init__(params, data, policy, settings, is_pinned=is_pinned)
        self.shard_device = shard_device
        self.conductor = Conductor(data, [self], lambda: None)
        self.shown = Shown.SHARDED
        self.is_in_graphs = False  # compiled graphs gather it
        self._parts: list[FlatParams | ExtendedParam] = []
        self._is_pending = False
        self._is_small_everywhere = False  # agreed with all ranks: they gather from there
        self._served: list[Any] = []
        self._start_secs = 0.0  # of the gathering under way
        self._versions: list[int] = []
        self._addresses: list[tuple[int, bool]] = []

    # Memory

    def prepare(self) -> None:
        """Make the flat buffers, anew where parameters have changed their dtype or their device."""
        replaced = [param for param in self.params if param.take_replaced()]
        if replaced:
            self._roster.renew()
        if any(param.local.is_meta for param in self.params):
            return
        if not self._parts or not all(part.fits() for part in self._parts):
            self._build()

    def _build(self) -> None:
        parts = [ExtendedParam(param, self.data, self.policy) for param in self.params if param.is_extended]
        plain = [param for param in self.params if not param.is_extended]
        self._renew_batches()
        self._parts = list(parts)
        for param in self.params:
            param.accumulated = param.take_gradient()  # of backwards that didn't reduce
            param.whole = None
        if plain:
            self._parts.append(
                FlatParams(plain, self.data, self.policy, self.settings, is_pinned=self.is_pinned)
            )
        self._roster.renew()

    def _keep_up(self) -> None:
        """Notice what users have done to the parameters since the last time."""
        if not self._parts or self._addresses != self._roster.addresses():
            self.prepare()
            for part in self._parts:
                part.keep_up()
            self._addresses = self._roster.addresses()

    @property
    def is_kept_in_place(self) -> bool:
        """Whether the whole parameters are the sharded ones' memory: a single rank's."""
        return all(part.is_in_place for part in self._parts)

    @property
    def is_at_hand(self) -> bool:
        """Whether the parameters are whole, or about to be."""
        return self._is_pending or self.shown is Shown.WHOLE

    @property
    def is_unused_ahead(self) -> bool:
        """Whether it was gathered for other ranks, or for nobody."""
        return self._is_pending

    @property
    def num_bytes(self) -> int:
        """Of the whole parameters."""
        return sum(part.num_bytes for part in self._parts)

    # Gathering

    def need_whole(self) -> None:
        """Return when the modules have whole parameters; what the plan has next is on its way then."""
        if self.shown is Shown.WHOLE:
            return
        if self._is_pending:
            self.conductor.found_ready(self.index)
        else:
            self.start_whole()
        self.finish_whole()
        if not self.is_at_hand:
            raise InternalError(f"fully_shard: {self.name} was gathered and is not whole.")

    def check_not_transformed(self) -> None:
        """Raise where somebody has put parameters with tangents, or batches of them, in the modules."""
        for param in self.params:
            for slot, name in param.slots:
                registered = slot[name]
                if not isinstance(registered, DTensor) and not is_whole(registered):
                    raise UnsupportedError(
                        f"fully_shard: parameter {param.name} was replaced for a transform of torch.func or "
                        "for forward-mode AD, and the gathered parameter would take its place. Give tangents "
                        "to inputs only; differentiate by parameters in reverse mode."
                    )

    def drop_stale(self) -> None:
        """Free whole parameters that were kept while the sharded ones were changed."""
        if self.shown is not Shown.WHOLE or not self._versions:
            return
        if self._versions != self._roster.versions() or not self._roster.is_up_to_date():
            self.reshard()

    def drop_small(self) -> None:
        """A forward begins: what an earlier one has left on the smaller mesh may be older than the shards."""
        if self.shown is Shown.SMALL:
            self.reshard()
        self._is_small_everywhere = False

    def show_sharded(self) -> None:
        """Let modules have sharded parameters. What all ranks agreed to gather from stays as it is."""
        if self.shown is Shown.SMALL:
            self._roster.show_sharded()
        else:
            self.reshard()

    def start_whole(self) -> None:
        """Start to gather, unless that is under way or done."""
        if self.shown is Shown.WHOLE or self._is_pending:
            return
        if self.data.shard_size == 1:
            self.launch_gather()  # no other rank is concerned
        else:
            self.conductor.gather(self.index)

    def launch_gather(self) -> None:
        """Start to gather, or help others to. Called in the same order on all ranks."""
        if self.shown is Shown.SHARDED and not self._is_pending:
            self._keep_up()
        if self.shown is Shown.WHOLE or self._is_pending:
            self._served += [part.serve_gather(self.name) for part in self._parts]
            return
        self._start_secs = time.perf_counter()
        for part in self._parts:
            part.launch_gather(self.name, from_small=self._is_small_everywhere)
        self._is_pending, self._is_small_everywhere = True, False

    def finish_whole(self) -> None:
        """Wait for the gathering under way, and give the modules whole parameters."""
        self._finish_served()
        if not self._is_pending:
            return
        self._is_pending = False
        for part in self._parts:
            part.finish_gather()
        self._roster.show_whole()
        self.shown = Shown.WHOLE
        # Only what is kept can become stale.
        is_kept = self.settings.after_forward is None or not self.settings.reshards_after_backward
        self._versions = self._roster.versions() if is_kept else []
        note(
            "unshard",
            FEATURE,
            self.name,
            self.data.shard_group,
            bytes_out=self.num_bytes,
            start_secs=self._start_secs,
        )

    def drop_ahead(self) -> None:
        """Free what was gathered for other ranks."""
        if self._is_pending and self.shown is Shown.SMALL:
            self._is_pending = False  # it is there, too, and stays
            for part in self._parts:
                part.drop_whole()
        elif self._is_pending:
            self.reshard()

    def _finish_served(self) -> None:
        served, self._served = self._served, []
        for handle in served:
            if handle is not None:
                handle.wait()

    def reshard(self) -> None:
        """Give the modules sharded parameters, and the memory of the whole ones back."""
        self._finish_served()
        if self._is_pending:  # nobody needs it any more
            self._is_pending = False
            for part in self._parts:
                part.drop_gather()
        elif self.shown is Shown.SHARDED:
            return
        self._roster.show_sharded()
        if not self.is_kept_in_place:
            self._roster.mark_freed()
        for part in self._parts:
            part.free()
        self.shown = Shown.SHARDED
        self._is_small_everywhere = False
        note("reshard", FEATURE, self.name, self.data.shard_group, bytes_in=self.num_bytes)

    def reshard_after_forward(self) -> None:
        """What the settings say for after forward."""
        small = self.settings.after_forward
        if small is None:
            return
        if small is self.data:
            self.reshard()
        elif self.shown is Shown.WHOLE or self._is_pending:
            self.finish_whole()
            for part in self._parts:
                part.shrink(small)
            self._roster.mark_freed()
            self.shown = Shown.SMALL
            note("reshard", FEATURE, self.name, small.shard_group, bytes_in=self.num_bytes)

    def stays_whole(self, *, in_backward: bool) -> bool:
        """Whether it is whole and stays so when the forward, or the backward, has ended."""
        is_kept = not in_backward or not self.settings.reshards_after_backward
        return self.shown is Shown.WHOLE and is_kept and self.data.shard_size > 1

    def freed_after_forward(self, *, frees_all: bool) -> list[int]:
        """Where the memory is that the end of forward gives back."""
        is_freed = frees_all or self.settings.after_forward is not None
        if not is_freed or self.shown is not Shown.WHOLE:
            return []
        return [address for part in self._parts for address in part.whole_addresses()]

    def settle_small(self, is_everywhere: bool) -> None:
        """After a forward of all ranks: whether every one of them has this group on the smaller mesh."""
        if self._is_pending and is_everywhere:
            self.drop_ahead()  # gathered for others once more, after this rank was there
        elif self._is_pending or (self.shown is Shown.SMALL and not is_everywhere):
            self.reshard()
        self._is_small_everywhere = is_everywhere

    def forget_step(self) -> None:
        """Drop everything that an exception has left unfinished, gradients included."""
        self.forget_gradients()
        self.reshard()
