"""Uneven inputs: what a sharded module does for ranks that have run out of inputs (weft.join).

A rank that has joined goes on to all-gather its shards and to reduce into its gradients: without it no rank
can unshard. So its shards must go on to be optimized, too, and Join is told how. Once a rank has joined, each
step begins with a message: active ranks say how they run it, so that joined ones follow the same plan.

Invariant: in a step joined and active ranks have equal settings for gradients, and the same mean scale. The
shadowed step itself is state.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from weft import comm
from weft.errors import ConfigError
from weft.fsdp.mesh import FEATURE
from weft.fsdp.reduce import ReductionQueue
from weft.join import Join, Joinable, JoinHook
from weft.join.watch import JoinWatch

if TYPE_CHECKING:
    from weft.fsdp.param_group import ParamGroup
    from weft.fsdp.state import ModuleState

_NOT_GIVEN = object()
_NUM_FIXED = 3  # integers of a step's message before the groups' flags: active, number of those, backward


class ShardedJoinable(Joinable, calls_by_feature=True):
    """A sharded module as a Joinable."""

    _get_fsdp_state: Callable[[], ModuleState]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """How joined ranks shadow this module.

        `optimizer`: what updates this rank's shards after each step of the active ranks: an optimizer, or a
        function that does what the training loop does after backward. None: nothing does, as in an
        evaluation.
        """
        state = self._get_fsdp_state()
        optimizer = kwargs.get("optimizer", _NOT_GIVEN)
        self._join_problem = None
        if optimizer is _NOT_GIVEN:
            params = [param for group in state.groups_below() for param in group.params]
            if not all(param.has_post_accumulate_hooks for param in params):
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
        """The device of Join's own messages."""
        return self._get_fsdp_state().device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks join: all that share the model's data, over both axes of a hybrid mesh."""
        meshes = [group.dp_mesh for group in self._get_fsdp_state().groups_below()]
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
        self._zero_grad: Callable[[], Any] | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self._after_backward, self._zero_grad = optimizer.step, optimizer.zero_grad
        elif optimizer is not None:
            if not callable(optimizer):
                raise ConfigError(
                    f"Join: optimizer must be an optimizer or a function, got {type(optimizer).__name__}."
                )
            self._after_backward = optimizer

    def main_hook(self) -> None:
        """Take part in one step of the active ranks, then update this rank's shards as they do theirs."""
        if self._zero_grad is not None:
            self._zero_grad()
        self._state.lazy_init().shadow_step(self._state)
        if self._after_backward is not None:
            self._after_backward()


class UnevenSteps:
    """Keeps active and joined ranks in the same step with the same settings."""

    def __init__(self, reduction_queue: ReductionQueue) -> None:
        self._reduction_queue = reduction_queue
        self._forward: tuple[JoinWatch, int] | None = None  # whose calls are a Joinable's, and which one's

    def begin_step(self, root: ModuleState) -> None:
        """Before a forward on an active rank: tell joined ones how it runs. No effect outside of a Join."""
        owner: Any = root.modules[0]
        self._reduction_queue.mean_scale = 1.0
        if not isinstance(owner, Joinable) or not owner._join_config.enable:
            return
        problem = getattr(owner, "_join_problem", None)
        if problem is not None:
            raise ConfigError(problem)
        Join.notify_join_context(owner)
        if owner._join_config.watch is not None:
            self._forward = (owner._join_config.watch, id(owner))
            owner._join_config.watch.forwards.add(id(owner))
        num_active = Join.num_active(owner) or 1
        if num_active < owner.join_process_group.size():
            self._set_mean_scale(owner, num_active)
            flags = [flag for group in _groups_of(root) for flag in _grad_flags(group)]
            _exchange(owner, [1, num_active, int(torch.is_grad_enabled()), *map(int, flags)])

    def end_forward(self) -> None:
        """After a forward, also one that failed. No effect outside of a Join."""
        if self._forward is not None:
            watch, owner_id = self._forward
            watch.forwards.discard(owner_id)
            self._forward = None

    @contextmanager
    def shadowed_step(self, root: ModuleState) -> Generator[bool]:
        """A step of the active ranks, on a joined one, with their settings; yields whether backward runs."""
        owner: Any = root.modules[0]
        groups = _groups_of(root)
        rows = _exchange(owner, [0] * (_NUM_FIXED + 2 * len(groups)))
        active = next(row for row in rows if row[0])
        self._set_mean_scale(owner, active[1])
        own_flags = [_grad_flags(group) for group in groups]
        for group, at in zip(groups, range(_NUM_FIXED, len(active), 2), strict=True):
            _set_grad_flags(group, (bool(active[at]), bool(active[at + 1])))
        try:
            yield bool(active[2])
        finally:
            for group, flags in zip(groups, own_flags, strict=True):
                _set_grad_flags(group, flags)

    def _set_mean_scale(self, owner: Any, num_active: int) -> None:
        divides_by_all = getattr(owner, "_divide_by_initial_world_size", True)
        num_ranks = owner.join_process_group.size()
        self._reduction_queue.mean_scale = 1.0 if divides_by_all else num_ranks / num_active


def _exchange(owner: Any, row: list[int]) -> list[list[int]]:
    return comm.exchange_rows(row, owner.join_process_group, feature=FEATURE, name="join")


def _grad_flags(group: ParamGroup) -> tuple[bool, bool]:
    return group.settings.reduces_grads, group.settings.all_reduces_grads


def _set_grad_flags(group: ParamGroup, flags: tuple[bool, bool]) -> None:
    group.settings.reduces_grads, group.settings.all_reduces_grads = flags


def _groups_of(root: ModuleState) -> list[ParamGroup]:
    assert root.model is not None
    return [group for state in root.model.states for group in state.groups]
