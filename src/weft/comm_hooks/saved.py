"""Hook states that are saved: everything but the process groups, which belong to one run."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch.distributed as dist

logger = logging.getLogger(__name__)


class GroupFreePickle:
    """Pickles without process groups; what is loaded uses the default group, or none yet if there is none."""

    __slots__ = ()
    _groups: ClassVar[tuple[str, ...]] = ("process_group",)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes but the groups."""
        logger.warning(
            "%s: a process group can't be saved, so the saved state is without %s.",
            type(self).__name__,
            " and ".join(self._groups),
        )
        names: list[str] = list(getattr(type(self), "__slots__", ())) or list(vars(self))
        return {name: getattr(self, name) for name in names if name not in self._groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes and, for the group, the default one."""
        for name in self._groups:
            setattr(self, name, None)
        self.process_group: dist.ProcessGroup | None = dist.group.WORLD if dist.is_initialized() else None
        logger.warning(
            "%s: the loaded state uses the default process group; set `process_group` for another one.",
            type(self).__name__,
        )
        for name, value in state.items():
            setattr(self, name, value)
