"""A copy of a sharded model that is sharded alike and independent of it.

Modules are copied as plain ones with sharded parameters, without hooks and states; then both, the old and the
new, get their states. So a copy never sees half-made buffers, and process groups are shared.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import RefusedError
from weft.fsdp.choose import Site
from weft.fsdp.group import ParamGroup
from weft.fsdp.param import ShardedParam
from weft.fsdp.pipelined import StageState
from weft.fsdp.state import ModuleState
from weft.fsdp.tree import find_state
from weft.modules import STATES_KEY, enter_state


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What copy.deepcopy gives for a sharded module. Every rank of its mesh should make the same copies."""
    states = list(
        dict.fromkeys(state for part in module.modules() if (state := find_state(part)) is not None)
    )
    _check_ready(module, states)
    parts = {part for state in states for part in state.modules}
    taken = [(part, type(part), part.__dict__.pop(STATES_KEY)) for part in parts]
    for state in states:
        for group in state.groups:
            group.reshard()
            for param in group.params:
                _rewrap_gradient(param)
        state.remove()
    for part, cls, _ in taken:
        part.__class__ = cls._weft_own_class  # type: ignore[attr-defined]
    try:
        # The values: `module` itself is in the memo from here on.
        copied = copy.deepcopy(module, memo)
    finally:
        for part, cls, kept in taken:
            part.__class__ = cls
            part.__dict__[STATES_KEY] = kept
        for state in states:
            state.install()
    new_states = {state: _copy_state(state, memo) for state in states}
    for part, cls, kept in taken:
        new = memo[id(part)]
        new.__class__ = cls
        new.__dict__[STATES_KEY] = {key: new_states.get(value, value) for key, value in kept.items()}
        for state in kept.values():
            if state in new_states:
                enter_state(new, StageState(new_states[state]))
    for state, new_state in new_states.items():
        new_state.forward_prefetch = [new_states.get(other, other) for other in state.forward_prefetch]
        new_state.backward_prefetch = [new_states.get(other, other) for other in state.backward_prefetch]
        new_state.install()
    return copied


def _check_ready(module: nn.Module, states: Sequence[ModuleState]) -> None:
    inside = set(module.modules())
    if any(part not in inside for state in states for part in state.modules):
        raise RefusedError(
            "FSDP does not support deepcopy of a part of modules that were sharded together, as a list. Copy "
            "the module that contains all of them."
        )
    if any(state.tree is None for state in states):
        raise RefusedError(
            "FSDP does not support deepcopy of a model that has not run yet. Copy it before fully_shard, or "
            "after its first forward. Please use state dict for serialization."
        )


def _rewrap_gradient(param: ShardedParam) -> None:
    """Graphs make gradients that are parts of a flat tensor, which torch takes for DTensors with memory."""
    grad = param.sharded.grad
    if isinstance(grad, DTensor) and grad.storage_offset():
        param.sharded.grad = param.wrap_gradient(grad._local_tensor)


def _copy_state(state: ModuleState, memo: dict[int, Any]) -> ModuleState:
    return ModuleState(
        [memo[id(module)] for module in state.modules],
        [_copy_group(group, memo) for group in state.groups],
        state.policy,
        state.device,
        keeps_root_whole=state.keeps_root_whole,
    )


def _copy_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    params: list[ShardedParam] = []
    for param in group.params:
        sites = [Site(memo[id(site.module)], site.name) for site in param.sites]
        sharded = sites[0].module._parameters[sites[0].name]
        assert sharded is not None
        copied = ShardedParam(param.name, sites, param.placement, group.data, sharded)
        copied.origin = param.origin
        copied.show_sharded()  # tied ones stay one
        params.append(copied)
    settings = dataclasses.replace(group.settings)
    return ParamGroup(
        params, group.data, group.policy, settings, group.shard_device, is_pinned=group.is_pinned
    )
