"""All sharded modules of a model, as one: their numbers, their order, the forward and backward under way.

It is made at the first forward, when every fully_shard has been applied; the module that runs first is the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.autograd import current_backward, on_backward_end
from weft.errors import ConfigError, StateError
from weft.fsdp.conductor import Conductor
from weft.fsdp.group import ParamGroup, Shown
from weft.fsdp.reductions import Reductions
from weft.join import Join, Joinable
from weft.modules import attached

if TYPE_CHECKING:
    from weft.fsdp.state import ModuleState


class Tree:
    """The states below one root, with what they share."""

    def __init__(self, root: ModuleState, states: Sequence[tuple[str, ModuleState]]) -> None:
        self.root = weakref.ref(root)
        self.states = [state for _, state in states]
        self.reductions = Reductions()
        self.conductors: list[Conductor] = []
        self.forward_root: ModuleState | None = None
        self.is_in_backward = False
        self._end_callback: weakref.ref[Any] | None = None
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
        """One conductor for each set of ranks; its groups and their parameters are numbered in module order."""
        by_mesh: dict[Hashable, list[ParamGroup]] = {}
        for group in self._groups:
            by_mesh.setdefault(tuple(map(_ranks, group.data.groups)), []).append(group)
        for groups in by_mesh.values():
            conductor = Conductor(groups[0].data, groups, self.serve_all)
            num_params = 0
            for index, group in enumerate(groups):
                group.index, group.conductor, group.reductions = index, conductor, self.reductions
                for param in group.params:
                    param.bit = num_params
                    num_params += 1
            conductor.num_params = num_params
            self.conductors.append(conductor)

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
        self._notify_join(root)
        self._begin_phases(("forward", self.states.index(root), torch.is_grad_enabled(), self._settings()))

    def _begin_phases(self, key: Hashable) -> None:
        for conductor in self.conductors:
            conductor.begin(key)

    def _notify_join(self, root: ModuleState) -> None:
        """Inside a Join: tell ranks that have joined that a step comes, and learn how many make it."""
        owner: Any = root.modules[0]
        if not isinstance(owner, Joinable) or not owner._join_config.enable:
            self.reductions.mean_scale = 1.0
            return
        Join.notify_join_context(owner)
        num_active = Join.num_active(owner)
        is_whole = getattr(owner, "_divide_by_initial_world_size", True)
        num_ranks = owner.join_process_group.size()
        self.reductions.mean_scale = 1.0 if is_whole or num_active is None else num_ranks / num_active

    def shadow_step(self, root: ModuleState) -> None:
        """Take part in a forward and a backward of other ranks, with this rank's shards and no gradients."""
        self._begin_phases(("forward", self.states.index(root), True, self._settings()))
        self.end_forward()
        self.is_in_backward = True
        self._begin_phases(("backward", self._settings()))
        self.end_backward()

    def end_forward(self) -> None:
        """It has ended: on this rank, and when this returns on all."""
        self.serve_all()
        for state in self.states:
            state.end_forward()
        for conductor in self.conductors:
            self._agree_on_small(conductor)
        self.forward_root = None

    def _agree_on_small(self, conductor: Conductor) -> None:
        """Backward gathers over a smaller mesh only what every rank has there."""
        groups = [group for group in self._groups if group.conductor is conductor]
        small = sum(1 << group.index for group in groups if group.shown is Shown.SMALL)
        told = conductor.end(small)
        for group in groups:
            group.settle_small(all(bits >> group.index & 1 for bits in told))

    # Backward

    def enter_backward(self) -> None:
        """A backward has reached a sharded module. Harmless when it was known."""
        if self.is_in_backward:
            return
        if current_backward() is None:
            raise StateError("fully_shard: a hook of backward ran outside of one.")
        self.is_in_backward = True
        self._begin_phases(("backward", self._settings()))
        alive = _Alive(self.end_backward)
        self._end_callback = weakref.ref(alive)
        on_backward_end(alive)

    def _is_backward_alive(self) -> bool:
        return self._end_callback is not None and self._end_callback() is not None

    def end_backward(self) -> None:
        """Everything is computed: reduce what is left, wait, and hand out the gradients."""
        for state in reversed(self.states):
            for group in reversed(state.groups):
                state.after_backward_of(group)
        self.serve_all()
        used_somewhere: dict[Conductor, int] = {}
        for conductor in self.conductors:
            used = 0
            for group in self._groups:
                if group.conductor is conductor:
                    used |= group.used
            union = 0
            for bits in conductor.end(used):
                union |= bits
            used_somewhere[conductor] = union
        self.reductions.finish()
        for group in self._groups:
            if group.settings.reshards_after_backward:
                group.reshard()  # also what was gathered for other ranks
        for group in self._groups:
            group.decide(used_somewhere[group.conductor])
        for state in self.states:
            state.end_backward()
        self.is_in_backward = False

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

    def _settings(self) -> Hashable:
        return tuple(group.settings.order_key() for group in self._groups)


class _Alive:
    """A callback that only the backward it belongs to holds."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def __call__(self) -> None:
        self._callback()


def plant_tree(root: ModuleState) -> Tree:
    """Make the tree of all states below this one, which is the first to run."""
    if len(root.modules) > 1:
        raise StateError(
            f"FSDP requires a single root module but got {root.modules}: the first module that runs must contain all "
            "others. Apply fully_shard to that one, too, or run it first."
        )
    found: dict[ModuleState, str] = {}
    for name, module in root.modules[0].named_modules():
        state = find_state(module)
        if state is None:
            continue
        if state is not root and state.tree is not None and state not in found:
            raise StateError(
                f"FSDP state has already been lazily initialized for {name}. FSDP requires running forward through "
                "the root module first: module and root would not know of each other."
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


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _check_no_duplicates(groups: Sequence[ParamGroup]) -> None:
    owners: dict[object, ParamGroup] = {}
    for group in groups:
        for param in group.params:
            owner = owners.setdefault(param.origin, group)
            if owner is not group:
                raise ConfigError(
                    f"Parameter '{param.name}' is shared with a parameter already managed by another FSDP group "
                    f"(that of {owner.name}). For shared/tied parameters, use fully_shard([module_a, module_b]) to "
                    "place them in the same FSDP group."
                )
