"""All-gather a group's parameters: this rank's shards in one flat buffer, unsharded parameters in another.

Parameters of one dtype live in the sharded buffer: their local tensors are views of it, so that an all-gather
needs no copy-in. Users may give a parameter other memory (`module.to`, load_state_dict(assign=True),
`.data = `); that is noticed before the next all-gather, and the buffer takes the values over. Parameters of
several dtypes are all-gathered together as bytes; they are copied into a buffer each time.

Invariant: the unsharded buffer's storage is resized, never replaced, so that views of it stay valid,
autograd's too.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from weft import comm
from weft.comm import Handle
from weft.comm.call import hosted_by
from weft.fsdp.mesh import FEATURE, DataParallelMesh
from weft.fsdp.param import ShardedParam, copy_from_rank_major
from weft.fsdp.placement import ShardLayout, post_forward_spec
from weft.fsdp.policy import GroupSettings, MixedPrecisionPolicy
from weft.tensors import (
    Spread,
    contiguous_strides,
    copy_all,
    make_parameter,
    plan_spread,
    view_in,
    with_dtype,
)

_ALIGN = 16  # elements, at which a parameter starts that is copied out of its all-gathered shards


class FlatParams:
    """Parameters that one all-gather unshards."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dp_mesh: DataParallelMesh,
        policy: MixedPrecisionPolicy,
        settings: GroupSettings,
        *,
        is_pinned: bool = False,
    ) -> None:
        # Wide dtypes first: then every shard starts at a multiple of its itemsize.
        self.params = sorted(params, key=lambda param: -param.compute_dtype(policy).itemsize)
        self._dp_mesh = dp_mesh
        self._settings = settings
        self._dtypes = [param.dtype for param in self.params]
        self._compute_dtypes = [param.compute_dtype(policy) for param in self.params]
        self._shard_device = self.params[0].local.device
        is_uniform = len({*zip(self._dtypes, self._compute_dtypes, strict=True)}) == 1
        self._buffer_dtype = self._compute_dtypes[0] if is_uniform else torch.uint8
        # Elements of the buffers that an element of each parameter takes.
        self._widths = [1 if is_uniform else dtype.itemsize for dtype in self._compute_dtypes]
        layouts = [param.layout for param in self.params]
        self._spread = plan_spread(
            [layout.padded_numel * width for layout, width in zip(layouts, self._widths, strict=True)],
            [layout.padded_shard_numel * width for layout, width in zip(layouts, self._widths, strict=True)],
            dp_mesh.shard_size,
        )
        # On a single rank the sharded parameters' memory serves as the unsharded ones', unless it is cast
        # or offloaded.
        self.is_alias = (
            dp_mesh.shard_size == 1
            and self._dtypes == self._compute_dtypes
            and self._shard_device == dp_mesh.device
        )
        self._sharded_flat: torch.Tensor | None = None
        if is_uniform and dp_mesh.shard_size > 1:
            self._sharded_flat = torch.zeros(
                self._spread.shard_numel,
                dtype=self._dtypes[0],
                device=self._shard_device,
                pin_memory=is_pinned,
            )
        self._unsharded_flat: torch.Tensor | None = None  # made by the first all-gather
        self._regions: list[torch.Tensor] = []  # each parameter's in it, 1D
        # Copied out after the all-gather: parameter, its shards by rank, its unsharded tensor.
        self._rank_major: list[tuple[ShardedParam, torch.Tensor, torch.Tensor]] = []
        self._movable: list[tuple[ShardedParam, torch.Tensor]] = []  # with where they belong
        self._post_forward_mesh: DataParallelMesh | None = None
        self._post_forward_shard: torch.Tensor | None = None
        self._pending: Handle[torch.Tensor] | None = None
        self._sharded_ptrs: list[int] = []
        self._adopt_memory()

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self._spread.whole_numel * self._buffer_dtype.itemsize

    # Sharded

    @torch.no_grad()
    def _adopt_memory(self) -> None:
        """Move local tensors that lie elsewhere into the sharded buffer."""
        if self._sharded_flat is not None:
            for param, start in zip(self.params, self._spread.shard_starts, strict=True):
                strides = contiguous_strides(param.local_shape)
                view = view_in(self._sharded_flat, start, param.local_shape, strides)
                if param.local.data_ptr() != view.data_ptr():
                    view.copy_(param.local)
                    param.local = view
        self._sharded_ptrs = [param.local.data_ptr() for param in self.params]

    def fits(self) -> bool:
        """Whether the buffers still fit the parameters' dtypes and device, and none has got an extension."""
        return all(
            param.dtype == dtype and param.local.device == self._shard_device and not param.has_extension
            for param, dtype in zip(self.params, self._dtypes, strict=True)
        )

    def adopt_moved(self) -> None:
        """Notice parameters that have got other memory."""
        if [param.local.data_ptr() for param in self.params] != self._sharded_ptrs:
            self._adopt_memory()
            if self.is_alias:
                self._unsharded_flat = None

    def _make_input(self) -> torch.Tensor:
        """This rank's input of the all-gather: its shards in the compute dtypes, on the device."""
        if self._sharded_flat is not None:
            return self._sharded_flat.to(self._dp_mesh.device, self._buffer_dtype, non_blocking=True)
        flat = torch.zeros(self._spread.shard_numel, dtype=self._buffer_dtype, device=self._dp_mesh.device)
        with torch.no_grad():
            copy_all(
                [
                    _typed_view(flat, start, param.local_shape, dtype)
                    for param, start, dtype in zip(
                        self.params, self._spread.shard_starts, self._compute_dtypes, strict=True
                    )
                ],
                [param.local for param in self.params],
            )
        return flat

    # Unshard

    def start_all_gather(self, name: str, *, from_post_forward: bool) -> None:
        """Start to fill the unsharded parameters."""
        if self._unsharded_flat is None:
            self._init_unsharded()
        if self.is_alias:
            return
        flat = self._unsharded_flat
        assert flat is not None
        allocate_storage(flat)
        if not from_post_forward or self._post_forward_mesh is None or self._post_forward_shard is None:
            self._pending = self._all_gather(flat, name)
            return
        self._pending = comm.all_gather_spread(
            flat[: self._spread.whole_numel],
            self._post_forward_shard,
            self._post_forward_spread(self._post_forward_mesh),
            self._post_forward_mesh.shard_group,
            feature=FEATURE,
            name=name,
        ).followed()

    def launch_for_peers(self, name: str) -> Handle[torch.Tensor] | None:
        """Take part in an all-gather for peers; already unsharded here."""
        if self._dp_mesh.shard_size == 1:
            return None
        scratch = torch.empty(self._spread.whole_numel, dtype=self._buffer_dtype, device=self._dp_mesh.device)
        return self._all_gather(scratch, name)

    def _all_gather(self, flat: torch.Tensor, name: str) -> Handle[torch.Tensor] | None:
        if self._dp_mesh.shard_size == 1:  # only cast, or copied to the device
            with torch.no_grad():
                copy_all(self._regions, [param.local.view(-1) for param in self.params])
            return None
        if self._settings.custom_all_gather is not None:
            self._all_gather_custom(flat, self._make_input())
            return None
        return comm.all_gather_spread(
            flat[: self._spread.whole_numel],
            self._make_input(),
            self._spread,
            self._dp_mesh.shard_group,
            feature=FEATURE,
            name=name,
        ).followed()

    def _all_gather_custom(self, flat: torch.Tensor, shard: torch.Tensor) -> None:
        """All-gather through the user's own implementation."""
        custom, spread = self._settings.custom_all_gather, self._spread
        shape = (spread.num_ranks * spread.shard_numel,)
        with hosted_by(FEATURE):
            output = custom.allocate(shape, dtype=shard.dtype, device=shard.device)
            work = custom(
                output_tensor=output, input_tensor=shard, group=self._dp_mesh.shard_group, async_op=False
            )
            if work is not None:
                work.wait()
        rows = output.view(spread.num_ranks, spread.shard_numel)
        for numel, start, at in zip(
            spread.piece_numels, spread.shard_starts, spread.whole_starts, strict=True
        ):
            target = flat.data[at : at + numel * spread.num_ranks].view(spread.num_ranks, numel)
            target.copy_(rows[:, start : start + numel])

    def finish_all_gather(self) -> None:
        """Wait until the unsharded parameters have their values."""
        self.wait_all_gather()
        with torch.no_grad():
            for param, by_rank, unsharded in self._rank_major:
                copy_from_rank_major(by_rank, param.layout, unsharded)
            for param, own in self._movable:
                if param.unsharded is not None and param.unsharded.data_ptr() != own.data_ptr():
                    param.unsharded.data = own
        self._post_forward_shard = None

    def wait_all_gather(self) -> None:
        """Wait for the all-gather under way, needed or not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _init_unsharded(self) -> None:
        # Not inference tensors, also where the first use is under inference_mode: training comes later.
        with torch.inference_mode(False), torch.no_grad():
            if self.is_alias:
                self._unsharded_flat = torch.empty(0)
                for param in self.params:
                    param.point_unsharded_at(param.local.detach())
                self._movable = [(param, param.local.detach()) for param in self.params if param.may_be_moved]
            else:
                self._allocate_unsharded()

    def _allocate_unsharded(self) -> None:
        """One buffer for the all-gather's output, and behind it what is copied out of that."""
        spread = self._spread
        copied_numel = sum(
            _aligned(param.layout.numel * width)
            for param, width in zip(self.params, self._widths, strict=True)
            if not param.layout.has_contiguous_shards
        )
        self._unsharded_flat = flat = torch.empty(
            spread.whole_numel + copied_numel + _ALIGN,
            dtype=self._buffer_dtype,
            device=self._dp_mesh.device,
        )
        end = _aligned(spread.whole_numel)
        for param, start, numel, width, dtype in zip(
            self.params, spread.whole_starts, spread.numels, self._widths, self._compute_dtypes, strict=True
        ):
            layout = param.layout
            region = _typed_view(flat, start, (numel // width,), dtype)
            self._regions.append(region)
            if layout.has_contiguous_shards:
                view = _typed_view(flat, start, layout.shape, dtype)
            else:
                view = _typed_view(flat, end, layout.shape, dtype)
                self._rank_major.append((param, region, view))
                end += _aligned(layout.numel * width)
            param.init_unsharded(view)
            if param.may_be_moved:
                self._movable.append((param, view))

    # Reshard

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        self.free_unsharded()
        self._post_forward_shard = None

    def free_unsharded(self) -> None:
        """Free the unsharded parameters, but not the post-forward shard."""
        self.wait_all_gather()
        if self._unsharded_flat is not None and not self.is_alias:
            free_storage(self._unsharded_flat)

    def freed_ptrs(self) -> list[int]:
        """The storages that `reshard` frees."""
        if self._unsharded_flat is None or self.is_alias:
            return []
        return [self._unsharded_flat.untyped_storage().data_ptr()]

    @torch.no_grad()
    def reshard_to(self, mesh: DataParallelMesh) -> None:
        """Keep only this rank's shard over the post-forward mesh, and register it."""
        spread, rank = self._post_forward_spread(mesh), mesh.shard_rank
        assert self._unsharded_flat is not None
        shard = torch.empty(spread.shard_numel, dtype=self._buffer_dtype, device=self._dp_mesh.device)
        starts = [spread.piece_start(index, rank) for index in range(len(self.params))]
        copy_all(
            [shard[at : at + n] for at, n in zip(spread.shard_starts, spread.piece_numels, strict=True)],
            [self._unsharded_flat[at : at + n] for at, n in zip(starts, spread.piece_numels, strict=True)],
        )
        for param, at, dtype in zip(self.params, spread.shard_starts, self._compute_dtypes, strict=True):
            local = _post_forward_local(param, mesh, shard, at, dtype)
            spec = with_dtype(post_forward_spec(param.placement, mesh), local.dtype)
            param.register(make_parameter(local, spec, requires_grad=param.sharded.requires_grad))
        free_storage(self._unsharded_flat)
        self._post_forward_mesh, self._post_forward_shard = mesh, shard

    def _post_forward_spread(self, mesh: DataParallelMesh) -> Spread:
        factor = self._dp_mesh.shard_size // mesh.shard_size
        numels = [numel * factor for numel in self._spread.piece_numels]
        return self._spread.kept_or_made(
            ("post_forward", mesh.shard_size),
            lambda: plan_spread(self._spread.numels, numels, mesh.shard_size),
        )


def _post_forward_local(
    param: ShardedParam, mesh: DataParallelMesh, shard: torch.Tensor, start: int, dtype: torch.dtype
) -> torch.Tensor:
    """A parameter's local tensor on the post-forward mesh: a view of the flat shard, where it can be one."""
    layout = ShardLayout(param.layout.shape, param.layout.dim, mesh.shard_size)
    factor = param.layout.num_ranks // layout.num_ranks
    if param.layout.has_contiguous_shards and layout.chunk_length == factor * param.layout.chunk_length:
        return _typed_view(shard, start, layout.shard_shape(mesh.shard_rank), dtype)
    assert param.unsharded is not None
    local = getattr(param.unsharded, "_local_tensor", param.unsharded)
    return local.detach().narrow(layout.dim, *layout.span(mesh.shard_rank)).clone()


def _typed_view(flat: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that starts at this element of a flat buffer, whose elements may be bytes of it."""
    if flat.dtype == dtype:
        return view_in(flat, start, shape, contiguous_strides(shape))
    alias = torch.empty(0, dtype=dtype, device=flat.device)
    return alias.set_(
        flat.untyped_storage(), start // dtype.itemsize, torch.Size(shape), contiguous_strides(shape)
    )


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


# Storage that is freed and allocated again under tensors that stay


class _Thread(threading.local):
    plans_for_gpu = False


_this_thread = _Thread()


def reallocates_cheaply(device: torch.device) -> bool:
    """Whether freed memory is cheap to allocate again. On a CPU new memory costs more than a copy into it."""
    return device.type != "cpu" or _this_thread.plans_for_gpu


@contextmanager
def memory_as_on_gpu() -> Generator[None]:
    """For plans, whose CPU tensors stand for a GPU's: all memory is cheap inside, on this thread."""
    outer, _this_thread.plans_for_gpu = _this_thread.plans_for_gpu, True
    try:
        yield
    finally:
        _this_thread.plans_for_gpu = outer


def allocate_storage(tensor: torch.Tensor) -> None:
    """Give the tensor memory if it has none. Its values are undefined."""
    storage = tensor.untyped_storage()
    num_bytes = int((tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    if storage.size() < num_bytes:
        storage.resize_(num_bytes)


def free_storage(tensor: torch.Tensor) -> None:
    """Free the tensor's memory. Nobody may read it before it is allocated again."""
    storage = tensor.untyped_storage()
    if storage.size():
        if tensor.is_cuda:
            # It goes back to the stream under which it was allocated, which may be ahead of this one.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        storage.resize_(0)
