"""A sharded module in a compiled graph: whether its parameters can be gathered there, and the gathering.

Where Dynamo traces a module's forward together with its hooks, parameters become steps of the graph: gathered at
its start, registered in the modules while it is traced, and the sharded ones again at its end. Modules whose
settings ask for more than that break the graph, and their hooks do what they do without a compiler. So do
the hooks of a module whose forward is the start of a graph: Dynamo calls them outside.

Ranks must run the same graphs: nobody keeps them in order there, and what no rank tells the others, as which
parameters it used, must be the same on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.compiler import allow_in_graph, install, note_gathers, run_at_trace
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

    def __init__(self, cargo: str, params: Sequence[ShardedParam], group: ParamGroup) -> None:
        self.cargo = cargo
        self.homes: list[Slot] = [param.slots[0] for param in params]
        self.places: list[tuple[int, Any, str]] = [
            (at, slot, name) for at, param in enumerate(params) for slot, name in param.slots
        ]
        self.group = group


class GraphSide:
    """What graphs see of a module's state. Dynamo reads its plain attributes and guards on them."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self.obstacle = ""  # why graphs can't gather these parameters, whatever the settings
        self.loads: list[Load] = []
        self.owner: Any = None  # the root, whose Join there may be
        self.together: list[GraphSide] = []  # of several modules each; the root closes them
        self.still_to_run: tuple[int, ...] = ()  # of several modules
        self.depth = 0  # forwards under way
        self.hidden: tuple[Any, ...] = ()  # sharded parameters, while whole ones are in their places

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
        sides = [state.graph for state in tree.states]
        self.together = [side for side in sides if len(side._state.modules) > 1] if self is root.graph else []
        self.obstacle = next(filter(None, map(_find_obstacle, self._state.groups)), "")
        for group in self._state.groups:
            _give_own_storage(group.params)
        self.loads = [] if self.obstacle else [load for group in self._state.groups for load in _loads(group)]
        return True

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

    def enter(self) -> None:
        """Gather, and let modules have the whole parameters."""
        self.depth += 1
        if self.hidden:
            return
        if len(self._state.modules) > 1:
            self.still_to_run = tuple(range(len(self._state.modules)))
        hidden: list[Any] = []
        for load in self.loads:
            sharded = [slot[name] for slot, name in load.homes]
            frees = load.group.settings.after_forward is not None
            wholes = gather_in_graph(load.cargo, frees, sharded)
            for at, slot, name in load.places:
                hidden.append(slot[name])
                slot[name] = wholes[at]
        self.hidden = tuple(hidden)

    def leave(self, module: nn.Module) -> None:
        """Let modules have the sharded parameters again, when all that share them have run."""
        self.depth -= 1
        if self.still_to_run:
            modules = self._state.modules
            self.still_to_run = tuple(at for at in self.still_to_run if modules[at] is not module)
        if self.depth == 0 and not self.still_to_run:
            self.close()
        for side in self.together:
            side.close()

    def close(self) -> None:
        """The forward is over, or given up."""
        hidden, self.hidden = self.hidden, ()
        self.depth, self.still_to_run = 0, ()
        at = 0
        for load in self.loads if hidden else ():
            for _, slot, name in load.places:
                slot[name] = hidden[at]
                at += 1


def _give_own_storage(params: Iterable[ShardedParam]) -> None:
    """Let each piece be the start of a storage, of the same memory: compilers take a DTensor for one that is."""
    for param in params:
        if param.local.storage_offset() != param.sharded.storage_offset():
            param.local = torch.from_dlpack(param.local)


def _find_obstacle(group: ParamGroup) -> str:
    """What is not going to change while a graph is in use."""
    if group.data.shard_size == 1:
        return "its parameters are not sharded over several ranks"
    if group.data.replicate_size > 1:
        return "its parameters are replicated as well"
    if group.shard_device != group.data.device:
        return "its parameters are offloaded"
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
    if settings.divide_factor is not None or settings.reduces_unused or settings.reduce_group is not None:
        return "gradients are reduced in a way of their own"
    return ""


def _loads(group: ParamGroup) -> Iterable[Load]:
    by_dtype: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[ShardedParam]] = {}
    for param in group.params:
        dtypes = (param.dtype, param.compute_dtype(group.policy), param.reduce_dtype(group.policy))
        by_dtype.setdefault(dtypes, []).append(param)
    data = group.data
    assert data.shard_group is not None
    sums_only = group.settings.sums_only or data.device.type == "cpu"  # where backends know no mean
    for dtypes, params in by_dtype.items():
        division = plan_division(dtypes[2], data.shard_size, sums_only=sums_only)
        cargo = Cargo(
            tuple(param.split for param in params),
            data.shard_rank,
            data.shard_size,
            data.shard_group.group_name,
            *dtypes,
            "avg" if division.averages else "sum",
            division.before,
            division.after,
        )
        yield Load(cargo.encode(), params, group)
