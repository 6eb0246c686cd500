"""A sharded module in a compiled graph: whether its parameters can be unsharded there, and how.

Where Dynamo traces a module's forward together with its hooks, the graph makes the unsharded parameters: they
are in the modules while it is traced, and the sharded ones again at its end. Modules whose settings ask for
more than that break the graph, and their hooks do what they do without a compiler. So do the hooks of a
module whose forward is the start of a graph: Dynamo calls them outside of it.

The graph's forward all-gathers, its backward reduce-scatters: `_c10d_functional` ops, which compilers know
and move. The sharded parameters are inputs of the graph: autograd itself gives them their gradients and runs
their hooks.

Invariant: ranks run the same graphs. No collective order is kept there, and what ranks don't exchange, as
which parameters they used, must be the same on all.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from weft.comm.spread_packing import LARGE_PIECE_BYTES
from weft.comm.traced import can_gather, gather_flat, scatter_flat
from weft.compiler import (
    allow_in_graph,
    call_before_traces,
    install,
    made_again_in_backward,
    note_gathers,
    opened_piece,
    run_at_trace,
)
from weft.fsdp.param import ShardedParam
from weft.fsdp.param_group import ParamGroup, ShardedState
from weft.fsdp.placement import ShardLayout
from weft.fsdp.reduce import plan_mean

if TYPE_CHECKING:
    from weft.fsdp.state import ModuleState

Slot = tuple[Any, str]  # a module's dictionary of parameters, and a name in it
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # of shards, in forward and backward, of reductions


class TracedModuleState:
    """What graphs see of a module's state. Dynamo reads its plain attributes and guards on them."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self.break_reason = ""  # why graphs can't unshard these parameters, whatever the settings
        self.owner: Any = None  # the root, which a Join may be about
        self.unshards: list[TracedUnshard] = []  # of each module, where there are several
        self.pre_forward_outside: Any = None  # the hooks, where they break the graph
        self.post_forward_outside: Any = None
        self._outside_by_reason: dict[str, tuple[Any, ...]] = {}

    # While a forward is traced

    @run_at_trace
    def prepare_trace(self) -> bool:
        """Prepare what a traced forward reads. Runs while it is traced, and leaves no guards."""
        model = self._state.lazy_init()
        install()
        note_gathers()
        allow_in_graph(all_gather_in_graph)
        root = model.root()
        assert root is not None
        self.owner = root.modules[0]
        self.close()
        self.break_reason = next(filter(None, map(_find_fixed_reason, self._state.groups)), "")
        if not self.break_reason:
            for group in self._state.groups:
                group.is_in_graphs = True
                group.drop_prefetched()
                _give_own_storage(group.params)
            unshards = [TracedUnshard(_plan_all_gathers(one, self._state)) for one in self._state.modules]
            if list(map(_layouts_of, unshards)) != list(map(_layouts_of, self.unshards)):
                self.unshards = unshards  # else those that Dynamo has seen stay
        self._break_at_hooks()
        return True

    def _break_at_hooks(self) -> None:
        """Let calls of hooks that are not for a graph break it, and say why."""
        reason = f"fully_shard: {self.find_break_reason()}"
        if reason not in self._outside_by_reason:
            hooks = (self._state.pre_forward_eager, self._state.post_forward_eager)
            self._outside_by_reason[reason] = tuple(
                torch.compiler.disable(hook, reason=reason) for hook in hooks
            )
        self.pre_forward_outside, self.post_forward_outside = self._outside_by_reason[reason]

    def find_break_reason(self) -> str:
        """Why this forward's parameters can't be unsharded in the graph; empty if they can."""
        if self.break_reason:
            return self.break_reason
        if self.owner._join_config.enable:
            return "inputs may be uneven: a Join is under way"
        for group in self._state.groups:
            found = _find_settings_reason(group)
            if found:
                return found
        return ""

    def unshard_of(self, module: nn.Module) -> TracedUnshard | None:
        """That of this module's forward, if it has been in a graph."""
        for own, unshard in zip(self._state.modules, self.unshards, strict=False):
            if own is module:
                return unshard
        return None

    def close(self) -> None:
        """No forward is under way."""
        for unshard in self.unshards:
            unshard.close()


class TracedUnshard:
    """One module's unsharded parameters in a graph, for a forward of the module."""

    def __init__(self, all_gathers: Sequence[TracedAllGather]) -> None:
        self.all_gathers = all_gathers
        self.depth = 0  # forwards under way: a module may call itself
        self.sharded: tuple[Any, ...] = ()  # by slot, while the unsharded parameters are in the slots

    def begin(self) -> None:
        """All-gather, and register the unsharded parameters."""
        self.depth += 1
        if self.depth > 1:
            return
        replaced: list[Any] = []
        for one in self.all_gathers:
            sharded = [slot[name] for slot, name in one.first_slots]
            reshards = one.group.settings.post_forward_mesh is not None
            unsharded = all_gather_in_graph(one.layout, reshards, sharded)
            for at, slot, name in one.slots:
                replaced.append(slot[name])
                slot[name] = unsharded[at]
        self.sharded = tuple(replaced)

    def end(self) -> None:
        """Register the sharded parameters again."""
        self.depth -= 1
        if self.depth:
            return
        sharded, self.sharded = self.sharded, ()
        at = 0
        for one in self.all_gathers:
            for _, slot, name in one.slots:
                slot[name] = sharded[at]
                at += 1

    def close(self) -> None:
        """End it where an exception has ended the forward unseen."""
        if self.depth:
            self.depth = 1
            self.end()


class TracedAllGather:
    """One all-gather of a graph, and the slots of its parameters."""

    def __init__(self, layout: str, slots: Sequence[Sequence[Slot]], group: ParamGroup) -> None:
        self.layout = layout  # encoded: a constant of the graph
        self.first_slots = [of_param[0] for of_param in slots]
        self.slots = [(at, slot, name) for at, of_param in enumerate(slots) for slot, name in of_param]
        self.group = group


def _layouts_of(unshard: TracedUnshard) -> list[str]:
    return [one.layout for one in unshard.all_gathers]


# In the graph


def all_gather_in_graph(layout: str, reshards: bool, sharded: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The unsharded parameters. `reshards`: backward all-gathers them again in place of keeping them.

    A step of the graph: compilers look into it only when autograd has been through.
    """
    shards = [opened_piece(param) for param in sharded]
    unsharded: Any = _AllGather.apply(layout, reshards, *shards)  # type: ignore[no-untyped-call]
    return unsharded


class _AllGather(torch.autograd.Function):
    """`apply(layout, reshards, *shards)`: the unsharded parameters of this rank's shards."""

    @staticmethod
    def forward(ctx: Any, encoded: str, reshards: bool, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.encoded = encoded
        ctx.set_materialize_grads(False)
        layout = TracedLayout.decode(encoded)
        with made_again_in_backward(reshards):
            table = gather_flat(layout.pack_shard(shards), layout.num_ranks, layout.group)
            return tuple(layout.unpack_table(table))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        layout = TracedLayout.decode(ctx.encoded).only(needed)
        given = [grad for grad, is_needed in zip(grads, needed, strict=True) if is_needed]
        like = next((grad for grad in given if grad is not None), None)
        if like is None:
            return (None,) * len(ctx.needs_input_grad)
        shard = scatter_flat(layout.pack_table(given, like), layout.op, layout.num_ranks, layout.group)
        means = iter(layout.unpack_shard(shard))
        # What has no gradient here has none on any rank: ranks run the same graph.
        results = [next(means) if is_needed else None for is_needed in needed]
        used = [mean if grad is not None else None for mean, grad in zip(results, grads, strict=True)]
        return (None, None, *used)


@dataclass(frozen=True, slots=True)
class TracedLayout:
    """Parameters of one dtype that a graph all-gathers together, and how they lie on the way. Pure.

    A rank's flat shard is its padded shards, one behind the other; the flat shards of all ranks are the rows
    of a table. A graph knows a layout by its text, which is a constant of it.
    """

    layouts: tuple[ShardLayout, ...]
    rank: int
    num_ranks: int
    group: str  # its name, by which graphs find it
    dtype: torch.dtype  # of the shards, and of their gradients
    compute_dtype: torch.dtype  # of the unsharded parameters
    reduce_dtype: torch.dtype
    op: str  # of the reduction
    predivide_factor: float
    postdivide_factor: float

    def encode(self) -> str:
        """As a constant of a graph."""
        dtypes = [_dtype_name(dtype) for dtype in (self.dtype, self.compute_dtype, self.reduce_dtype)]
        layouts = [(layout.shape, layout.dim) for layout in self.layouts]
        ranks = [self.rank, self.num_ranks, self.group]
        return json.dumps([layouts, *ranks, *dtypes, self.op, self.predivide_factor, self.postdivide_factor])

    @staticmethod
    @functools.cache
    def decode(text: str) -> TracedLayout:
        """From a constant of a graph."""
        layouts, rank, num_ranks, group, *rest = json.loads(text)
        dtypes = [getattr(torch, name) for name in rest[:3]]
        by_param = tuple(ShardLayout(tuple(shape), dim, num_ranks) for shape, dim in layouts)
        return TracedLayout(by_param, rank, num_ranks, group, *dtypes, *rest[3:])

    # Parameters

    def pack_shard(self, shards: Sequence[Tensor]) -> Tensor:
        """This rank's shards as its flat shard, in the compute dtype."""
        flat = [
            _padded(shard.to(self.compute_dtype).reshape(-1), layout.padded_shard_numel)
            for shard, layout in zip(shards, self.layouts, strict=True)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def unpack_table(self, table: Tensor) -> list[Tensor]:
        """The unsharded parameters, of the flat shards of all ranks."""
        rows = table.view(self.num_ranks, -1)
        columns = rows.split([layout.padded_shard_numel for layout in self.layouts], dim=1)
        return [_join_rows(column, layout) for column, layout in zip(columns, self.layouts, strict=True)]

    # Gradients

    def pack_table(self, grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """The gradients as the flat shards of all ranks, in the reduce dtype. None counts as zeros."""
        columns = [
            like.new_zeros(self.num_ranks, layout.padded_shard_numel, dtype=self.reduce_dtype)
            if grad is None
            else _split_into_rows(grad.to(self.reduce_dtype), layout)
            for grad, layout in zip(grads, self.layouts, strict=True)
        ]
        table = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return (table if self.predivide_factor == 1.0 else table / self.predivide_factor).reshape(-1)

    def unpack_shard(self, shard: Tensor) -> list[Tensor]:
        """The gradients of this rank's shards, of its flat shard of the reduced ones."""
        shard = (shard if self.postdivide_factor == 1.0 else shard / self.postdivide_factor).to(self.dtype)
        parts = shard.split([layout.padded_shard_numel for layout in self.layouts])
        shapes = [layout.shard_shape(self.rank) for layout in self.layouts]
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def only(self, wanted: Sequence[bool]) -> TracedLayout:
        """The same for some of the parameters."""
        chosen = zip(self.layouts, wanted, strict=True)
        return replace(self, layouts=tuple(layout for layout, is_wanted in chosen if is_wanted))


def _padded(flat: Tensor, numel: int) -> Tensor:
    num_missing = numel - flat.numel()
    return functional.pad(flat, (0, num_missing)) if num_missing else flat


def _join_rows(column: Tensor, layout: ShardLayout) -> Tensor:
    """An unsharded parameter, of the rows that hold its shards."""
    if layout.has_contiguous_shards:
        return column.contiguous().view(-1)[: layout.numel].view(layout.shape)
    shapes = [layout.shard_shape(rank) for rank in range(layout.num_ranks)]
    shards = [row[: math.prod(shape)].view(shape) for row, shape in zip(column, shapes, strict=True)]
    return torch.cat(shards, dim=layout.dim)


def _split_into_rows(grad: Tensor, layout: ShardLayout) -> Tensor:
    """A row for each rank with its shard of a gradient."""
    if layout.has_contiguous_shards:
        flat = _padded(grad.reshape(-1), layout.num_ranks * layout.padded_shard_numel)
        return flat.view(layout.num_ranks, layout.padded_shard_numel)
    shards = [grad.narrow(layout.dim, *layout.span(rank)) for rank in range(layout.num_ranks)]
    return torch.stack([_padded(shard.reshape(-1), layout.padded_shard_numel) for shard in shards])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What a graph can't do


def _find_fixed_reason(group: ParamGroup) -> str:
    """Why graphs can't unshard the group, of what doesn't change while a graph is in use."""
    if group.dp_mesh.shard_size == 1:
        return "its parameters are not sharded over several ranks"
    if group.dp_mesh.replicate_size > 1:
        return "its parameters are replicated as well"
    if group.shard_device != group.dp_mesh.device:
        return "its parameters are offloaded"
    assert group.dp_mesh.shard_group is not None
    if not can_gather(group.dp_mesh.device, group.dp_mesh.shard_group):
        return "gloo can't gather tensors of a GPU in a graph; use nccl, or weft's own group"
    for param in group.params:
        if param.has_extension:
            return f"the tensor of {param.fqn} has an all-gather extension"
        if param.placement.unsharded_spec is not None:
            return f"{param.fqn} is sharded by others, too"
        if param.may_be_moved or any(not isinstance(slot, dict) for slot, _ in param.slots):
            return f"the module of {param.fqn} watches its parameters"
    return ""


def _find_settings_reason(group: ParamGroup) -> str:
    """Why the graph can't unshard the group now, of what the user has set. Traced."""
    settings = group.settings
    if not settings.reduces_grads or group.keeps_unreduced_grads:
        return "gradients are kept without being reduced"
    if group.sharded_state is not ShardedState.SHARDED or group.is_unshard_pending:
        return "its parameters are unsharded already"
    if settings.post_forward_mesh is not None and settings.post_forward_mesh is not group.dp_mesh:
        return "its parameters are kept on a smaller mesh after forward"
    if settings.comm_hook is not None or settings.all_reduce_hook is not None:
        return "gradients have a hook"
    if settings.custom_all_gather is not None or settings.custom_reduce_scatter is not None:
        return "it has collectives of the user's"
    if settings.gradient_divide_factor is not None or settings.sums_only or settings.reduces_unused:
        return "gradients are reduced in a way of their own"
    if settings.reduce_scatter_group is not None:
        return "gradients have a group of their own"
    return ""


# Planning of a module's all-gathers


def _plan_all_gathers(module: nn.Module, state: ModuleState) -> list[TracedAllGather]:
    """What this module's forward needs: all parameters, unless other modules have a part in them."""
    inside = set(module.modules())
    planned: list[TracedAllGather] = []
    for group in state.groups:
        together: dict[Hashable, dict[ShardedParam, list[Slot]]] = {}
        for param in group.params:
            sites = zip(param.sites, param.slots, strict=True)
            slots = [slot for site, slot in sites if site.module in inside]
            if slots:
                dtypes = _dtypes_of(param, group)
                # A large parameter is all-gathered alone: without copies.
                is_large = param.layout.padded_shard_numel * dtypes[1].itemsize >= LARGE_PIECE_BYTES
                key = (*dtypes, param if is_large else None)
                together.setdefault(key, {})[param] = slots
        for by_param in together.values():
            layout = _plan_layout(list(by_param), group)
            planned.append(TracedAllGather(layout.encode(), list(by_param.values()), group))
    return planned


def _plan_layout(params: Sequence[ShardedParam], group: ParamGroup) -> TracedLayout:
    mesh = group.dp_mesh
    dtypes = _dtypes_of(params[0], group)
    assert mesh.shard_group is not None
    # Not all backends of the CPU have a mean.
    mean = plan_mean(dtypes[2], mesh.shard_size, sums_only=mesh.device.type == "cpu")
    return TracedLayout(
        tuple(param.layout for param in params),
        mesh.shard_rank,
        mesh.shard_size,
        mesh.shard_group.group_name,
        *dtypes,
        "avg" if mean.averages else "sum",
        mean.predivide_factor,
        mean.postdivide_factor,
    )


def _dtypes_of(param: ShardedParam, group: ParamGroup) -> Dtypes:
    return param.dtype, param.compute_dtype(group.policy), param.reduce_dtype(group.policy)


# Outside of graphs: what those of others, an optimizer's above all, may read


class _Traceable(threading.local):
    """The groups of this thread's models."""

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


_traceable = _Traceable()


def keep_traceable(groups: Iterable[ParamGroup]) -> bool:
    """Let other graphs have these groups' parameters and gradients; False where nothing can be traced yet."""
    _traceable.groups.update(groups)
    return call_before_traces(_make_traceable)


def _make_traceable() -> None:
    for group in list(_traceable.groups):
        _give_own_storage(param for param in group.params if type(param.local) is torch.Tensor)


def _give_own_storage(params: Iterable[ShardedParam]) -> None:
    """Let each shard be the start of a storage, in the same memory: torch traces no DTensors of others."""
    for param in params:
        is_elsewhere = param.local.storage_offset() != param.sharded.storage_offset()
        if is_elsewhere and not param.has_extension:
            param.local = torch.from_dlpack(param.local)
        grad = param.sharded.grad
        if isinstance(grad, DTensor) and grad._local_tensor.storage_offset() != grad.storage_offset():
            param.sharded.grad = param.make_sharded_grad(torch.from_dlpack(grad._local_tensor))
