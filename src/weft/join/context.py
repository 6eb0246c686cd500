"""The context in which ranks may run out of inputs at different times.

A rank that leaves its loop *joins*: it runs the hooks of its Joinables once for every
step that another rank still makes, and leaves the context when all ranks have joined.
How ranks hear of each other is watch.py's work.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import Handle
from weft.comm.group import resolve_group
from weft.errors import ConfigError, StateError
from weft.join.callers import Callers
from weft.join.patches import innermost_watch
from weft.join.protocol import OUTSIDE, Joinable, JoinConfig
from weft.join.watch import JoinWatch
from weft.join.wire import MAX_GROUP_SIZE

_LARGE_SKEW = 1000  # steps


class Join:
    """Train on uneven inputs: ranks that have no more of them stand in for themselves.

    `joinables` take part in every step, the first of them first; their hooks run in this
    order. `kwargs` go to each one's `join_hook`. With `enable=False` the context does
    nothing. With `throw_on_early_termination` every rank raises RuntimeError as soon as
    one rank has no inputs left.

    An exception inside the block passes through, and the rank does not join: the
    others notice by the group's timeout, or at once where the group tells them.
    A Join can be entered again, one time after another.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = _checked(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._is_enabled = enable
        self._throws = throw_on_early_termination
        self._group = _common_group(self._joinables)
        self._device = self._joinables[0].join_device
        self._is_entered = False
        self._watch: JoinWatch | None = None

    def __enter__(self) -> Join:
        if not self._is_enabled:
            return self
        if self._is_entered:
            raise StateError("this Join has been entered already. Leave it before it is entered again.")
        if self._group.size() > 1:
            outer = innermost_watch(self._group)
            if isinstance(outer, JoinWatch):
                outer.before_nested()
            self._watch = JoinWatch(self._group, self._device, Callers(self._joinables, self._hooks))
            self._watch.install()
        self._is_entered = True
        self._configure(JoinConfig(True, self._throws, False, self._watch))
        self._joinables[0]._join_config = JoinConfig(True, self._throws, True, self._watch)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_entered:
            return
        watch, self._watch, self._is_entered = self._watch, None, False
        try:
            is_last_joiner = watch is None or (exc_type is None and self._shadow_steps(watch))
        finally:
            self._configure(OUTSIDE)
            if watch is not None:
                watch.remove()
        if exc_type is None:
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)

    def _configure(self, config: JoinConfig) -> None:
        for joinable in self._joinables:
            joinable._join_config = config

    def _shadow_steps(self, watch: JoinWatch) -> bool:
        """Run the main hooks until all ranks have joined. Returns whether this rank was among the last."""
        watch.join()
        self._configure(JoinConfig(True, self._throws))  # hooks may use the Joinables, and begin no steps
        num_steps = 0
        while not watch.wait_for_step().is_over:
            if self._throws:
                raise StateError(f"Rank {self._group.rank()} exhausted all inputs.")
            for hook in self._hooks:
                hook.main_hook()
            num_steps += 1
            if num_steps == _LARGE_SKEW + 1:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_LARGE_SKEW}. This means that rank "
                    f"{self._group.rank()} has at least {_LARGE_SKEW} fewer inputs than other "
                    "currently-active ranks. This level of skew could lead to performance degradation "
                    "during training.",
                    stacklevel=3,
                )
        return num_steps == 0

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Handle[torch.Tensor] | None:
        """Say that this rank makes another step. A Joinable calls it before its first collective of a step.

        Only the first Joinable of a Join communicates: it gets a Handle whose tensor holds
        the number of ranks that make this step. The others, and those outside of a Join, get
        None. Raises RuntimeError under `throw_on_early_termination` when a rank has joined.
        """
        config = getattr(joinable, "_join_config", None)
        if not isinstance(config, JoinConfig):
            raise ConfigError(
                f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor: only a "
                "weft.join.Joinable can notify a Join."
            )
        if not config.enable:
            return None
        watch = config.watch
        if watch is None:  # a group of one
            return Handle((), torch.ones(1, dtype=torch.int64)) if config.is_first_joinable else None
        if not watch.is_in_force:
            raise StateError(
                f"{type(joinable).__name__} is used inside a second Join on the same group, which it is not "
                "in. Pass all objects that communicate in the loop to one Join."
            )
        if not config.is_first_joinable:
            watch.check_step_begun(joinable)
            return None
        notice = watch.begin_step()
        if config.throw_on_early_termination and watch.is_tail():
            raise StateError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        return notice

    @staticmethod
    def num_active(joinable: Joinable) -> int | None:
        """How many ranks make the step that the Joinable has been notified of; None outside of a Join."""
        config = joinable._join_config
        if not config.enable:
            return None
        return 1 if config.watch is None else config.watch.num_active()


def _checked(joinables: Sequence[object]) -> list[Joinable]:
    if not joinables:
        raise ConfigError(
            "The join context manager requires at least one joinable. Pass the objects that communicate in "
            "the loop: Join([model, optimizer])."
        )
    given: list[Joinable] = []
    for one in joinables:
        if not isinstance(one, Joinable):
            raise ConfigError(
                f"Join got a {type(one).__name__}, which is not a Joinable. Pass "
                "weft.DistributedDataParallel, weft.ZeroRedundancyOptimizer or another subclass of "
                "weft.join.Joinable."
            )
        given.append(one)
    if len({id(one) for one in given}) < len(given):
        raise ConfigError("Join got the same joinable twice. Pass each one once.")
    return given


def _common_group(joinables: Sequence[Joinable]) -> dist.ProcessGroup:
    groups = [resolve_group(joinable.join_process_group) for joinable in joinables]
    if any(group is not groups[0] for group in groups):
        names = ", ".join(
            f"{type(one).__name__}: '{group.group_name}'"
            for one, group in zip(joinables, groups, strict=True)
        )
        raise ConfigError(
            f"Using join context manager with multiple process groups ({names}). Ranks join together, so "
            "give all joinables the same group."
        )
    if groups[0].size() > MAX_GROUP_SIZE:
        raise ConfigError(f"Join works with up to {MAX_GROUP_SIZE} ranks; this group has {groups[0].size()}.")
    return groups[0]
