"""What a sharded module does for ranks that ran out of inputs.

A rank that has joined goes on to give its shards and to take its gradients: without it nobody has whole
parameters. So its shards must go on to be optimized, too, and Join is told how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from weft.errors import ConfigError
from weft.fsdp.state import ModuleState
from weft.fsdp.tree import find_state
from weft.fsdp.user_hooks import steps_in_backward
from weft.join import Joinable, JoinHook

_NOT_GIVEN = object()


class ShardedJoinable(Joinable, calls_by_feature=True):
    """What makes a sharded module a Joinable."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """How this module is shadowed by ranks without inputs.

        `optimizer`: what updates this rank's shards after each step of the others: an optimizer, or a
        function that does what the training loop does after backward. None: nothing does, as in an
        evaluation.
        """
        state = _root_state(self)
        optimizer = kwargs.get("optimizer", _NOT_GIVEN)
        self._join_problem = None
        if optimizer is _NOT_GIVEN:
            if not all(steps_in_backward(param) for group in _groups(state) for param in group.params):
                # Raised by the first step, on every rank: a Join may be switched off.
                self._join_problem = (
                    f"Join with the sharded module {type(self).__name__} must know what optimizes its shards "
                    "on a rank that has joined: Join([model], optimizer=optimizer), or a function that does "
                    "what your loop does after backward; optimizer=None if nothing does."
                )
            optimizer = None
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShardedJoinHook(state, optimizer)

    @property
    def join_device(self) -> torch.device:
        """Where Join's own messages live."""
        return _root_state(self).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks join: all that share the model's data, over both axes of a hybrid mesh."""
        meshes = [part.data for part in _groups(_root_state(self))]
        if any(mesh.ranks != meshes[0].ranks for mesh in meshes):
            raise ConfigError(
                "Join needs one set of ranks, and the parts of this model are sharded over meshes of "
                f"different ranks: {sorted({tuple(sorted(mesh.ranks)) for mesh in meshes})}. Shard all of it "
                "over meshes of the same ranks to use uneven inputs."
            )
        return meshes[0].join_group


class ShardedJoinHook(JoinHook):
    """Shadows the collectives of a sharded module's step."""

    def __init__(self, state: ModuleState, optimizer: Any) -> None:
        self._state = state
        self._after_backward: Callable[[], Any] | None = None
        self._clear: Callable[[], Any] | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self._after_backward, self._clear = optimizer.step, optimizer.zero_grad
        elif optimizer is not None:
            if not callable(optimizer):
                raise ConfigError(
                    f"Join: optimizer must be an optimizer or a function, got {type(optimizer).__name__}."
                )
            self._after_backward = optimizer

    def main_hook(self) -> None:
        """Take part in one step of the others, then update this rank's shards as they do theirs."""
        if self._clear is not None:
            self._clear()
        self._state.ready().shadow_step(self._state)
        if self._after_backward is not None:
            self._after_backward()


def _root_state(module: Any) -> ModuleState:
    state = find_state(cast("nn.Module", module))
    assert state is not None
    return state


def _groups(state: ModuleState) -> list[Any]:
    seen = [find_state(part) for part in state.modules[0].modules()]
    return [group for found in dict.fromkeys(seen) if found is not None for group in found.groups]
