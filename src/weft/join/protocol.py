"""What takes part in a Join: a Joinable, and the JoinHook that stands in for it.

A Joinable communicates in every step of a loop. On a rank whose loop has ended, its
hook makes the calls that the other ranks' Joinables still make, with nothing in them.
When and how often is context.py's work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weft.join.watch import JoinWatch


class JoinHook:
    """What a joined rank runs in a Joinable's place. Both methods do nothing unless overridden."""

    def main_hook(self) -> None:
        """Make the collectives of one step of the active ranks, in their order, with neutral values.

        Called once for each step that at least one rank still makes.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do what is left to do when every rank has joined, on every rank.

        `is_last_joiner` is true on the ranks that made the most steps, one or several.
        """


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """What a Joinable knows of the Join that it is in, if any."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    watch: JoinWatch | None = None  # None also where nothing has to be watched: a group of one


OUTSIDE = JoinConfig()


class Joinable(ABC):
    """Something that communicates in every step and can be stood in for.

    It calls `Join.notify_join_context(self)` in each step before its first collective.
    All Joinables of one Join use the same group.
    """

    _join_config: JoinConfig = OUTSIDE

    # The `feature`s of its calls through weft.comm, those that its hook stands in for. None: of any
    # feature but "user". What its own methods call without the door is covered in any case.
    join_features: frozenset[str] | None = None

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that stands in for this object. `kwargs` are those given to Join, the same for all."""
        ...

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the tensors lie with which Join itself communicates."""
        ...

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the ranks that join."""
        ...
