"""Parameters in flat buffers: this rank's pieces in one shard, all whole ones in another.

Parameters of one dtype are kept in the shard: their local tensors are views of it, so that a gathering needs
no copy in. Users may give a parameter other memory (`module.to`, load_state_dict(assign=True), `.data = `);
it is noticed before the next gathering and taken over. Parameters of several dtypes travel together too, as
bytes: theirs are put into a shard for each gathering.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft import comm
from weft.comm import Handle
from weft.fsdp.mesh import DataMesh
from weft.fsdp.param import ShardedParam, restored_from_ranks
from weft.fsdp.placement import smaller_spec
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.settings import Settings
from weft.fsdp.split import Split
from weft.fsdp.storage import allocate_storage, free_storage
from weft.tensors import (
    Spread,
    contiguous_strides,
    copy_all,
    make_parameter,
    plan_spread,
    view_in,
    with_dtype,
)

FEATURE = "fsdp"


class FlatParams:
    """Parameters that are gathered by one collective."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        settings: Settings,
        *,
        is_pinned: bool = False,
    ) -> None:
        # Wide ones first: then every piece starts at a multiple of its width.
        self.params = sorted(params, key=lambda param: -param.compute_dtype(policy).itemsize)
        self._data = data
        self._settings = settings
        self._dtypes = [param.dtype for param in self.params]
        self._compute_dtypes = [param.compute_dtype(policy) for param in self.params]
        self._shard_device = self.params[0].local.device
        is_uniform = len({*zip(self._dtypes, self._compute_dtypes, strict=True)}) == 1
        # What the buffers are made of.
        self._unit = self._compute_dtypes[0] if is_uniform else torch.uint8
        self._widths = [1 if is_uniform else dtype.itemsize for dtype in self._compute_dtypes]
        self._spread = plan_spread(
            [
                param.split.spread_numel * width
                for param, width in zip(self.params, self._widths, strict=True)
            ],
            [param.split.piece_numel * width for param, width in zip(self.params, self._widths, strict=True)],
            data.shard_size,
        )
        # A single rank has whole parameters already.
        self._is_alias = (
            data.shard_size == 1
            and self._dtypes == self._compute_dtypes
            and self._shard_device == data.device
        )
        self._shard: torch.Tensor | None = None  # 1D; where parameters are kept
        if is_uniform and data.shard_size > 1:
            numel = self._spread.shard_numel
            self._shard = torch.zeros(
                numel, dtype=self._dtypes[0], device=self._shard_device, pin_memory=is_pinned
            )
        self._whole: torch.Tensor | None = None  # 1D; made when first needed
        self._regions: list[torch.Tensor] = []  # each parameter's in it, 1D
        self._by_rank: list[tuple[ShardedParam, torch.Tensor, torch.Tensor]] = []
        self._movable: list[tuple[ShardedParam, torch.Tensor]] = []  # with where they belong
        self._small: DataMesh | None = None
        self._small_shard: torch.Tensor | None = None
        self._pending: Handle[torch.Tensor] | None = None
        self._pointers: list[int] = []
        self._take_over()

    @property
    def num_bytes(self) -> int:
        """Of the whole parameters."""
        return self._spread.whole_numel * self._unit.itemsize

    @property
    def is_in_place(self) -> bool:
        """Whether the whole parameters are the sharded ones' memory."""
        return self._is_alias

    # The shard

    @torch.no_grad()
    def _take_over(self) -> None:
        """Put parameters that lie elsewhere into the shard."""
        if self._shard is not None:
            for param, start in zip(self.params, self._spread.shard_starts, strict=True):
                view = view_in(self._shard, start, param.local_shape, contiguous_strides(param.local_shape))
                if param.local.data_ptr() != view.data_ptr():
                    view.copy_(param.local)
                    param.local = view
        self._pointers = self._find_pointers()

    def _find_pointers(self) -> list[int]:
        return [param.local.data_ptr() for param in self.params]

    def fits(self) -> bool:
        """Whether parameters have the dtypes and the device they had, and none says itself what is gathered
        by now; if not, new buffers are needed.
        """
        return all(
            param.dtype == dtype and param.local.device == self._shard_device and not param.is_extended
            for param, dtype in zip(self.params, self._dtypes, strict=True)
        )

    def keep_up(self) -> None:
        """Notice parameters that have got other memory."""
        if self._find_pointers() != self._pointers:
            self._take_over()
            if self._is_alias:
                self._whole = None

    def _source(self) -> torch.Tensor:
        """This rank's shard as it travels: in the compute dtypes, on the device."""
        if self._shard is not None:
            return self._shard.to(self._data.device, self._unit, non_blocking=True)
        source = torch.zeros(self._spread.shard_numel, dtype=self._unit, device=self._data.device)
        with torch.no_grad():
            copy_all(
                [
                    _typed_view(source, start, param.local_shape, dtype)
                    for param, start, dtype in zip(
                        self.params, self._spread.shard_starts, self._compute_dtypes, strict=True
                    )
                ],
                [param.local for param in self.params],
            )
        return source

    # Gathering

    def launch_gather(self, name: str, *, from_small: bool) -> None:
        """Start to make the whole parameters."""
        self._make_whole()
        if self._is_alias:
            return
        whole = self._whole
        assert whole is not None
        allocate_storage(whole)
        if not from_small or self._small is None or self._small_shard is None:
            self._pending = self._gather(whole, name)
            return
        self._pending = comm.all_gather_spread(
            whole[: self._spread.whole_numel],
            self._small_shard,
            self._small_spread(self._small),
            self._small.shard_group,
            feature=FEATURE,
            name=name,
        ).followed()

    def serve_gather(self, name: str) -> Handle[torch.Tensor] | None:
        """Help others to gather what this rank has whole already."""
        if self._data.shard_size == 1:
            return None
        scratch = torch.empty(self._spread.whole_numel, dtype=self._unit, device=self._data.device)
        return self._gather(scratch, name)

    def _gather(self, whole: torch.Tensor, name: str) -> Handle[torch.Tensor] | None:
        if self._data.shard_size == 1:  # only cast, or copied to the device
            with torch.no_grad():
                copy_all(self._regions, [param.local.view(-1) for param in self.params])
            return None
        if self._settings.custom_gather is not None:
            return self._gather_custom(whole, self._source())
        return comm.all_gather_spread(
            whole[: self._spread.whole_numel],
            self._source(),
            self._spread,
            self._data.shard_group,
            feature=FEATURE,
            name=name,
        ).followed()

    def _gather_custom(self, whole: torch.Tensor, source: torch.Tensor) -> None:
        """Through the user's own all-gather."""
        custom, spread = self._settings.custom_gather, self._spread
        shape = (spread.num_ranks * spread.shard_numel,)
        arrived = custom.allocate(shape, dtype=source.dtype, device=source.device)
        work = custom(
            output_tensor=arrived, input_tensor=source, group=self._data.shard_group, async_op=False
        )
        if work is not None:
            work.wait()
        rows = arrived.view(spread.num_ranks, spread.shard_numel)
        for numel, start, at in zip(
            spread.piece_numels, spread.shard_starts, spread.whole_starts, strict=True
        ):
            target = whole.data[at : at + numel * spread.num_ranks].view(spread.num_ranks, numel)
            target.copy_(rows[:, start : start + numel])

    def finish_gather(self) -> None:
        """Wait until the whole parameters are there."""
        self.drop_gather()
        with torch.no_grad():
            for param, by_rank, whole in self._by_rank:
                restored_from_ranks(by_rank, param.split, whole)
            for param, whole in self._movable:
                if param.whole is not None and param.whole.data_ptr() != whole.data_ptr():
                    param.whole.data = whole
        self._small_shard = None

    def drop_gather(self) -> None:
        """Wait for a gathering, needed or not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def drop_whole(self) -> None:
        """Give the whole parameters' memory back, needed or not; what is on the smaller mesh stays."""
        self.drop_gather()
        if self._whole is not None and not self._is_alias:
            free_storage(self._whole)

    def free(self) -> None:
        """Give the whole parameters' memory back."""
        self.drop_whole()
        self._small_shard = None

    def whole_addresses(self) -> list[int]:
        """Where the memory is that `free` gives back."""
        is_own = self._whole is not None and not self._is_alias
        return [self._whole.untyped_storage().data_ptr()] if is_own else []  # type: ignore[union-attr]

    def _make_whole(self) -> None:
        if self._whole is not None:
            return
        # Not inference tensors, also where the first use is under inference_mode: training comes later.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_alias:
                self._whole = torch.empty(0)
                for param in self.params:
                    param.point_whole(param.local.detach())
                self._movable = [(param, param.local.detach()) for param in self.params if param.may_move]
            else:
                self._lay_out_whole()

    def _lay_out_whole(self) -> None:
        spread = self._spread
        room = sum(
            -(-param.split.numel * width // 16) * 16
            for param, width in zip(self.params, self._widths, strict=True)
            if not param.split.is_in_order
        )
        self._whole = whole = torch.empty(
            spread.whole_numel + room + 16, dtype=self._unit, device=self._data.device
        )
        end = -(-spread.whole_numel // 16) * 16
        for param, start, numel, width, dtype in zip(
            self.params, spread.whole_starts, spread.numels, self._widths, self._compute_dtypes, strict=True
        ):
            shape = param.split.shape
            region = _typed_view(whole, start, (numel // width,), dtype)
            self._regions.append(region)
            if param.split.is_in_order:
                view = _typed_view(whole, start, shape, dtype)
            else:
                view = _typed_view(whole, end, shape, dtype)
                self._by_rank.append((param, region, view))
                end += -(-param.split.numel * width // 16) * 16
            param.set_whole(view)
            if param.may_move:
                self._movable.append((param, view))

    # A smaller mesh between forward and backward

    def _small_spread(self, small: DataMesh) -> Spread:
        factor = self._data.shard_size // small.shard_size
        pieces = [numel * factor for numel in self._spread.piece_numels]
        key = ("small", small.shard_size)
        if key not in self._spread.kept:
            self._spread.kept[key] = plan_spread(self._spread.numels, pieces, small.shard_size)
        return self._spread.kept[key]

    @torch.no_grad()
    def shrink(self, small: DataMesh) -> None:
        """Keep only this rank's part of the whole parameters on a smaller mesh, and show it."""
        spread, rank = self._small_spread(small), small.shard_rank
        assert self._whole is not None
        shard = torch.empty(spread.shard_numel, dtype=self._unit, device=self._data.device)
        starts = [spread.piece_start(index, rank) for index in range(len(self.params))]
        copy_all(
            [shard[at : at + n] for at, n in zip(spread.shard_starts, spread.piece_numels, strict=True)],
            [self._whole[at : at + n] for at, n in zip(starts, spread.piece_numels, strict=True)],
        )
        for param, at, dtype in zip(self.params, spread.shard_starts, self._compute_dtypes, strict=True):
            split = Split(param.split.shape, param.split.dim, small.shard_size)
            local = self._small_local(param, split, rank, shard, at, dtype)
            spec = with_dtype(smaller_spec(param.placement, small), local.dtype)
            param.register(make_parameter(local, spec, requires_grad=param.sharded.requires_grad))
        free_storage(self._whole)
        self._small, self._small_shard = small, shard

    def _small_local(
        self, param: ShardedParam, split: Split, rank: int, shard: torch.Tensor, at: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """What a parameter shows of itself on the smaller mesh: memory that is gathered from, if it can."""
        factor = param.split.num_ranks // split.num_ranks
        if param.split.is_in_order and split.length == factor * param.split.length:
            return _typed_view(shard, at, split.piece_shape(rank), dtype)
        assert param.whole is not None
        plain = getattr(param.whole, "_local_tensor", param.whole)
        return plain.detach().narrow(split.dim, *split.span(rank)).clone()


def _typed_view(flat: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that starts at this element of a flat buffer, whose elements may be bytes of it."""
    if flat.dtype == dtype:
        return view_in(flat, start, shape, contiguous_strides(shape))
    alias = torch.empty(0, dtype=dtype, device=flat.device)
    return alias.set_(
        flat.untyped_storage(), start // dtype.itemsize, torch.Size(shape), contiguous_strides(shape)
    )
