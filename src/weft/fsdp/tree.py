"""All sharded modules of a model, as one: their numbers, their order, the forward and backward under way.

It is made at the first forward, when every fully_shard has been applied; the module that runs first is the
root.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.autograd import announce_gradients, current_backward, on_backward_end, traced_inside_only
from weft.errors import ConfigError, StateError
from weft.fsdp.conductor import Conductor
from weft.fsdp.graph_side import keep_traceable
from weft.fsdp.group import ParamGroup, Shown
from weft.fsdp.param import ShardedParam
from weft.fsdp.reductions import Reductions
from weft.fsdp.told import Told, bits_of, combine
from weft.fsdp.uneven_steps import UnevenSteps
from weft.modules import attached

if TYPE_CHECKING:
    from weft.fsdp.state import ModuleState


class Tree:
    """The states below one root, with what they share."""

    def __init__(self, root: ModuleState, states: Sequence[tuple[str, ModuleState]]) -> None:
        self.root = weakref.ref(root)
        self.states = [state for _, state in states]
        self.reductions = Reductions()
        self.uneven = UnevenSteps(self.reductions)
        self.conductors: list[Conductor] = []
        self.forward_root: ModuleState | None = None
        self.is_in_backward = False
        self._is_traceable = False
        self._end_callback: weakref.ref[Any] | None = None
        self._by_conductor: dict[Conductor, tuple[list[ParamGroup], int]] = {}
        self._kept: dict[Conductor, int] = {}  # groups that every rank has whole
        self._groups = [group for state in self.states for group in state.groups]
        self._name(states)
        _check_no_duplicates(self._groups)
        self._number()

    def _name(self, states: Sequence[tuple[str, ModuleState]]) -> None:
        for name, state in states:
            for group in state.groups:
                group.name = name or "root"
        root = self.root()
        assert root is not None
        names = {param: name for name, param in root.modules[0].named_parameters(remove_duplicate=False)}
        for group in self._groups:
            for param in group.params:
                param.name = names.get(param.sharded, param.name)

    def _number(self) -> None:
        """One conductor for each set of ranks; groups and parameters are numbered in module order."""
        by_mesh: dict[Hashable, list[ParamGroup]] = {}
        for group in self._groups:
            by_mesh.setdefault(tuple(sorted(group.data.mesh.mesh.flatten().tolist())), []).append(group)
        for groups in by_mesh.values():
            conductor = Conductor(groups[0].data, groups, self.serve_all)
            num_params = 0
            for index, group in enumerate(groups):
                group.index, group.conductor, group.reductions = index, conductor, self.reductions
                for param in group.params:
                    param.bit = num_params
                    num_params += 1
            conductor.num_bits = num_params + 2 * len(groups)
            self.conductors.append(conductor)
            self._by_conductor[conductor] = (groups, num_params)

    def serve_all(self) -> None:
        """Work off what is left of every mesh's plan."""
        for conductor in self.conductors:
            conductor.serve()

    # Forward

    def begin_forward(self, root: ModuleState) -> None:
        """The outermost sharded module's forward begins."""
        if self.is_in_backward and not self._is_backward_alive():
            self.forget_step()  # that backward has failed
        self.forward_root = root
        for group in self._groups:
            group.drop_small()
            group.release_gradients()
        self.uneven.begin_step(root)
        self._begin_phases("forward", self.states.index(root), torch.is_grad_enabled())

    def _begin_phases(self, *what: Hashable) -> None:
        settings = tuple(group.settings.order_key() for group in self._groups)
        for conductor in self.conductors:
            conductor.begin((*what, self._kept.get(conductor, 0), settings))

    def shadow_step(self, root: ModuleState) -> None:
        """Take part in a step of other ranks, with this rank's shards and no gradients."""
        with self.uneven.shadowed_step(root) as has_backward:
            self._begin_phases("forward", self.states.index(root), has_backward)
            self.end_forward()
            if has_backward:
                self._begin_phases("backward")
                self.is_in_backward = True
                self.end_backward()

    def end_forward(self) -> None:
        """It has ended: on this rank, and when this returns on all."""
        self.serve_all()
        for state in self.states:
            state.end_forward()
        for conductor, (groups, _) in self._by_conductor.items():
            heard = self._hear(conductor)
            for group in groups:
                group.settle_small(bool(heard.small >> group.index & 1))
        self.forward_root = None

    def _hear(self, conductor: Conductor) -> Told:
        """End the phase, and learn what follows from what all ranks tell."""
        groups, num_params = self._by_conductor[conductor]
        in_backward = self.is_in_backward
        mine = Told(
            used=functools.reduce(operator.or_, (group.used for group in groups)),
            small=bits_of(group.index for group in groups if group.shown is Shown.SMALL),
            whole=bits_of(group.index for group in groups if group.stays_whole(in_backward=in_backward)),
        )
        told = conductor.end(mine.pack(num_params, len(groups)))
        heard = combine([Told.unpack(bits, num_params, len(groups)) for bits in told])
        self._kept[conductor] = heard.whole
        return heard

    # Backward

    def enter_backward(self) -> None:
        """A backward has reached a sharded module. Harmless when it was known."""
        if self.is_in_backward and self._is_backward_alive():
            return
        if self.is_in_backward:
            self.forget_step()  # the one before has failed
        if current_backward() is None:
            raise StateError("fully_shard: a hook of backward ran outside of one.")
        self.is_in_backward = True
        announce_gradients([param.sharded for param in self._params()], unsynced=self)
        self._begin_phases("backward")
        alive = _Alive(self.end_backward)
        self._end_callback = weakref.ref(alive)
        on_backward_end(alive)

    def exchange_unsynced(self, kept: list[Any] | None) -> list[Any]:
        """Keep other gradients that are not reduced yet in place of those so far, which are returned."""
        return [
            param.exchange_unsynced((None, None) if kept is None else kept[place])
            for place, param in enumerate(self._params())
        ]

    def _params(self) -> list[ShardedParam]:
        return [param for group in self._groups for param in group.params]

    def _is_backward_alive(self) -> bool:
        return self._end_callback is not None and self._end_callback() is not None

    def end_backward(self) -> None:
        """Everything is computed: reduce what is left, wait, and hand out the gradients."""
        for state in reversed(self.states):
            for group in reversed(state.groups):
                state.after_backward_of(group)
        self.serve_all()
        used_somewhere = {conductor: self._hear(conductor).used for conductor in self.conductors}
        self.reductions.finish()
        for group in self._groups:
            if group.settings.reshards_after_backward or group.is_unused_ahead:
                group.reshard()  # also what was gathered for other ranks
        for group in self._groups:
            group.decide(used_somewhere[group.conductor])
        for state in self.states:
            state.end_backward()
        self.is_in_backward = False
        # Now there is something to step. Said after each backward: torch.compiler.reset() forgets it.
        self._is_traceable = keep_traceable(() if self._is_traceable else self._groups)

    def abandon_forward(self) -> None:
        """An exception ends the forward. Gradients of earlier ones stay."""
        for conductor in self.conductors:
            conductor.drop_phases()
        for group in self._groups:
            group.reshard()
        for state in self.states:
            state.end_forward()
        self.forward_root = None

    def start_over(self) -> None:
        """After ranks have failed at different places: forget the step, and the order of those before."""
        self.forget_step()
        for conductor in self.conductors:
            conductor.start_over()

    def forget_step(self) -> None:
        """Start afresh after an exception. Gradients that were not given to their parameters are lost."""
        for conductor in self.conductors:
            conductor.drop_phases()
        self.reductions.drop()
        for group in self._groups:
            group.forget_step()
        for state in self.states:
            state.end_forward()
            state.end_backward()
        self.forward_root = None
        self.is_in_backward = False


class _Alive:
    """A callback that only the backward it belongs to holds."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @traced_inside_only
    def __call__(self) -> None:
        self._callback()


def plant_tree(root: ModuleState) -> Tree:
    """Make the tree of all states below this one, which is the first to run."""
    if len(root.modules) != 1:
        raise StateError(
            f"FSDP requires a single root module but got {root.modules}: the first module that runs must "
            "contain all others. Apply fully_shard to that one, too, or run it first."
        )
    found: dict[ModuleState, str] = {}
    for name, module in root.modules[0].named_modules():
        state = find_state(module)
        if state is None:
            continue
        if state is not root and state.tree is not None and state not in found:
            raise StateError(
                f"FSDP state has already been lazily initialized for {name}. FSDP requires running forward "
                "through the root module first: module and root would not know of each other."
            )
        found[state] = name if state not in found else f"{found[state]}, {name}"
    tree = Tree(root, [(name, state) for state, name in found.items()])
    for state in found:
        state.tree = tree
        state.is_root = state is root
    return tree


def find_state(module: nn.Module) -> ModuleState | None:
    """The state that fully_shard, or replicate_with_fsdp, has tied to the module."""
    return attached(module, "fully_shard") or attached(module, "replicate_with_fsdp")


def _check_no_duplicates(groups: Sequence[ParamGroup]) -> None:
    owners: dict[object, ParamGroup] = {}
    for group in groups:
        for param in group.params:
            owner = owners.setdefault(param.origin, group)
            if owner is not group:
                raise ConfigError(
                    f"Parameter '{param.name}' is shared with a parameter already managed by another FSDP "
                    f"group (that of {owner.name}). For shared/tied parameters, use fully_shard([module_a, "
                    "module_b]) to place them in the same FSDP group."
                )
