"""A sharded module in a compiled graph: whether its parameters can be gathered there, and the gathering.

Where Dynamo traces a module's forward together with its hooks, whole parameters are made by the graph: they
are in the modules while it is traced, and the sharded ones again at its end. Modules whose settings ask for
more than that break the graph, and their hooks do what they do without a compiler. So do the hooks of a
module whose forward is the start of a graph: Dynamo calls them outside of it.

Ranks must run the same graphs: nobody keeps them in order there, and what no rank tells the others, as which
parameters it used, must be the same on all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm.spread_packing import LARGE_PIECE_BYTES
from weft.comm.traced import can_gather
from weft.compiler import allow_in_graph, call_before_traces, install, note_gathers, run_at_trace
from weft.fsdp.cargo import Cargo
from weft.fsdp.division import plan_division
from weft.fsdp.group import ParamGroup, Shown
from weft.fsdp.param import ShardedParam
from weft.fsdp.traced_gather import gather_in_graph

if TYPE_CHECKING:
    from weft.fsdp.state import ModuleState

Slot = tuple[Any, str]  # a module's dictionary of parameters, and a name in it


class Load:
    """What one gathering brings, and where it goes."""

    def __init__(self, cargo: str, places: Sequence[Sequence[Slot]], group: ParamGroup) -> None:
        self.cargo = cargo
        self.homes = [slots[0] for slots in places]  # of each parameter
        self.places = [(at, slot, name) for at, slots in enumerate(places) for slot, name in slots]
        self.group = group


class Stay:
    """One module's whole parameters in a graph, for a forward of the module."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self.depth = 0  # forwards under way: a module may call itself
        self.hidden: tuple[Any, ...] = ()  # sharded parameters, while whole ones are in their places

    def begin(self) -> None:
        """Gather, and let the module have the whole parameters."""
        self.depth += 1
        if self.depth > 1:
            return
        hidden: list[Any] = []
        for load in self.loads:
            sharded = [slot[name] for slot, name in load.homes]
            frees = load.group.settings.after_forward is not None
            wholes = gather_in_graph(load.cargo, frees, sharded)
            for at, slot, name in load.places:
                hidden.append(slot[name])
                slot[name] = wholes[at]
        self.hidden = tuple(hidden)

    def end(self) -> None:
        """Let it have the sharded ones again."""
        self.depth -= 1
        if self.depth:
            return
        hidden, self.hidden = self.hidden, ()
        at = 0
        for load in self.loads:
            for _, slot, name in load.places:
                slot[name] = hidden[at]
                at += 1

    def give_up(self) -> None:
        """An exception has ended the forward where nobody could tell."""
        if self.depth:
            self.depth = 1
            self.end()


class GraphSide:
    """What graphs see of a module's state. Dynamo reads its plain attributes and guards on them."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self.obstacle = ""  # why graphs can't gather these parameters, whatever the settings
        self.owner: Any = None  # the root, whose Join there may be
        self.stays: list[Stay] = []  # of each module, where there are several
        self.before_outside: Any = None  # what the hooks do where it is not for a graph
        self.after_outside: Any = None
        self._outside: dict[str, tuple[Any, ...]] = {}  # by why

    # While a forward is traced

    @run_at_trace
    def see_trace(self) -> bool:
        """Make ready what a traced forward reads. Runs while it is traced, and leaves no guards."""
        tree = self._state.ready()
        install()
        note_gathers()
        allow_in_graph(gather_in_graph)
        root = tree.root()
        assert root is not None
        self.owner = root.modules[0]
        self.close()
        self.obstacle = next(filter(None, map(_find_obstacle, self._state.groups)), "")
        if not self.obstacle:
            for group in self._state.groups:
                group.is_in_graphs = True
                group.drop_ahead()
                _give_own_storage(group.params)
            stays = [Stay(_plan_loads(module, self._state)) for module in self._state.modules]
            if list(map(_cargos, stays)) != list(map(_cargos, self.stays)):  # what Dynamo has seen stays
                self.stays = stays
        self._break_at_hooks()
        return True

    def _break_at_hooks(self) -> None:
        """Let calls of what is not for a graph break it, and say why."""
        reason = f"fully_shard: {self.find_obstacle()}"
        if reason not in self._outside:
            hooks = (self._state.before_eager_forward, self._state.after_eager_forward)
            self._outside[reason] = tuple(torch.compiler.disable(hook, reason=reason) for hook in hooks)
        self.before_outside, self.after_outside = self._outside[reason]

    def find_obstacle(self) -> str:
        """Why this forward's parameters can't be gathered in the graph; empty if they can."""
        if self.obstacle:
            return self.obstacle
        if self.owner._join_config.enable:
            return "inputs may be uneven: a Join is under way"
        for group in self._state.groups:
            found = _find_wish(group)
            if found:
                return found
        return ""

    def stay_of(self, module: nn.Module) -> Stay | None:
        """That of this module's forward, if it has been in a graph."""
        for own, stay in zip(self._state.modules, self.stays, strict=False):
            if own is module:
                return stay
        return None

    def close(self) -> None:
        """No forward is under way."""
        for stay in self.stays:
            stay.give_up()


def _cargos(stay: Stay) -> list[str]:
    return [load.cargo for load in stay.loads]


class _Traceable(threading.local):
    """The groups of this thread's models."""

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()


_traceable = _Traceable()


def keep_traceable(groups: Iterable[ParamGroup]) -> bool:
    """Let others' graphs have these groups' parameters and gradients, an optimizer's above all.

    False where nothing can be traced yet.
    """
    _traceable.groups.update(groups)
    return call_before_traces(_make_traceable)


def _make_traceable() -> None:
    for group in list(_traceable.groups):
        _give_own_storage(param for param in group.params if type(param.local) is torch.Tensor)


def _give_own_storage(params: Iterable[ShardedParam]) -> None:
    """Let each piece be the start of a storage, in the same memory: torch traces no DTensors of others."""
    for param in params:
        is_elsewhere = param.local.storage_offset() != param.sharded.storage_offset()
        if is_elsewhere and not param.is_extended:
            param.local = torch.from_dlpack(param.local)
        grad = param.sharded.grad
        if isinstance(grad, DTensor) and grad._local_tensor.storage_offset() != grad.storage_offset():
            param.sharded.grad = param.wrap_gradient(torch.from_dlpack(grad._local_tensor))


def _find_obstacle(group: ParamGroup) -> str:
    """What is not going to change while a graph is in use."""
    if group.data.shard_size == 1:
        return "its parameters are not sharded over several ranks"
    if group.data.replicate_size > 1:
        return "its parameters are replicated as well"
    if group.shard_device != group.data.device:
        return "its parameters are offloaded"
    assert group.data.shard_group is not None
    if not can_gather(group.data.device, group.data.shard_group):
        return "gloo can't gather tensors of a GPU in a graph; use nccl, or weft's own group"
    for param in group.params:
        if param.is_extended:
            return f"the tensor of {param.name} says itself what is gathered"
        if param.placement.whole_spec is not None:
            return f"{param.name} is sharded by others, too"
        if param.may_move or any(not isinstance(slot, dict) for slot, _ in param.slots):
            return f"the module of {param.name} watches its parameters"
    return ""


def _find_wish(group: ParamGroup) -> str:
    """What the user has asked for now that a graph doesn't do. Traced."""
    settings = group.settings
    if not settings.reduces or group.keeps_unsynced:
        return "gradients are kept without being reduced"
    if group.shown is not Shown.SHARDED or group.is_unused_ahead:
        return "its parameters are whole already"
    if settings.after_forward is not None and settings.after_forward is not group.data:
        return "its parameters are kept on a smaller mesh after forward"
    if settings.comm_hook is not None or settings.all_reduce_hook is not None:
        return "gradients have a hook"
    if settings.custom_gather is not None or settings.custom_reduce is not None:
        return "it has collectives of the user's"
    if settings.divide_factor is not None or settings.sums_only or settings.reduces_unused:
        return "gradients are reduced in a way of their own"
    if settings.reduce_group is not None:
        return "gradients have a group of their own"
    return ""


def _plan_loads(module: nn.Module, state: ModuleState) -> list[Load]:
    """What this module's forward needs: all, unless other modules have a part in it."""
    inside = set(module.modules())
    loads: list[Load] = []
    for group in state.groups:
        together: dict[Hashable, dict[ShardedParam, list[Slot]]] = {}
        for param in group.params:
            slots = [
                slot for site, slot in zip(param.sites, param.slots, strict=True) if site.module in inside
            ]
            if slots:
                together.setdefault(_kind(param, group), {})[param] = slots
        for places in together.values():
            cargo = _plan_cargo(list(places), group)
            loads.append(Load(cargo.encode(), list(places.values()), group))
    return loads


def _kind(param: ShardedParam, group: ParamGroup) -> Hashable:
    """What parameters that travel together have in common. A large one travels alone: without copies."""
    dtypes = _dtypes(param, group)
    is_large = param.split.piece_numel * dtypes[1].itemsize >= LARGE_PIECE_BYTES
    return (*dtypes, param if is_large else None)


def _dtypes(param: ShardedParam, group: ParamGroup) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    return param.dtype, param.compute_dtype(group.policy), param.reduce_dtype(group.policy)


def _plan_cargo(params: Sequence[ShardedParam], group: ParamGroup) -> Cargo:
    data = group.data
    dtypes = _dtypes(params[0], group)
    assert data.shard_group is not None
    # Not all backends of the CPU know a mean.
    division = plan_division(dtypes[2], data.shard_size, sums_only=data.device.type == "cpu")
    return Cargo(
        tuple(param.split for param in params),
        data.shard_rank,
        data.shard_size,
        data.shard_group.group_name,
        *dtypes,
        "avg" if division.averages else "sum",
        division.before,
        division.after,
    )
