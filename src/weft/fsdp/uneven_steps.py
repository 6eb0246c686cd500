"""Steps of a sharded model inside a Join, where ranks may have run out of inputs.

Once one has, each step begins with a message: those that still have inputs say how they run it, so that the
others follow the same plan.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weft import comm
from weft.errors import ConfigError
from weft.fsdp.reductions import Reductions
from weft.join import Join, Joinable

if TYPE_CHECKING:
    from weft.fsdp.group import ParamGroup
    from weft.fsdp.state import ModuleState


class UnevenSteps:
    """What ranks with and without inputs must know of each other's step."""

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions

    def begin_step(self, root: ModuleState) -> None:
        """A forward begins on a rank that has inputs. Outside of a Join nothing is to be said."""
        owner: Any = root.modules[0]
        self._reductions.mean_scale = 1.0
        if not isinstance(owner, Joinable) or not owner._join_config.enable:
            return
        problem = getattr(owner, "_join_problem", None)
        if problem is not None:
            raise ConfigError(problem)
        Join.notify_join_context(owner)
        num_active = Join.num_active(owner) or 1
        if num_active < owner.join_process_group.size():
            self._set_scale(owner, num_active)
            groups = _groups_below(root)
            flags = [flag for group in groups for flag in _flags(group)]
            _exchange(owner, [1, num_active, int(torch.is_grad_enabled()), *map(int, flags)])

    @contextmanager
    def shadowed_step(self, root: ModuleState) -> Generator[bool]:
        """A step of the others, on a rank without inputs, with their settings. Whether it has a backward."""
        owner: Any = root.modules[0]
        groups = _groups_below(root)
        rows = _exchange(owner, [0] * (3 + 2 * len(groups)))
        active = next(row for row in rows if row[0])
        self._set_scale(owner, active[1])
        own = [_flags(group) for group in groups]
        for group, at in zip(groups, range(3, len(active), 2), strict=True):
            group.settings.reduces, group.settings.reduces_replicas = bool(active[at]), bool(active[at + 1])
        try:
            yield bool(active[2])
        finally:
            for group, flags in zip(groups, own, strict=True):
                group.settings.reduces, group.settings.reduces_replicas = flags

    def _set_scale(self, owner: Any, num_active: int) -> None:
        is_whole = getattr(owner, "_divide_by_initial_world_size", True)
        num_ranks = owner.join_process_group.size()
        self._reductions.mean_scale = 1.0 if is_whole else num_ranks / num_active


def _exchange(owner: Any, row: list[int]) -> list[list[int]]:
    return comm.exchange_rows(row, owner.join_process_group, feature="fsdp", name="join")


def _flags(group: ParamGroup) -> tuple[bool, bool]:
    return group.settings.reduces, group.settings.reduces_replicas


def _groups_below(root: ModuleState) -> list[ParamGroup]:
    assert root.tree is not None
    return [group for state in root.tree.states for group in state.groups]
