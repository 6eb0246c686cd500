"""Gradients that weft sets itself, in place of autograd.

A strategy that reduces gradients keeps this rank's own in `.grad` for a while and then puts the reduced ones
there. It announces the parameters whose `.grad` it sets before it sets them, so that whoever wants the
gradients of this backward elsewhere (a context of distributed autograd) can make room first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Unsynced(Protocol):
    """Keeps gradients of backwards that were not to be reduced for one that is, outside of `.grad`."""

    def exchange_unsynced(self, kept: Any) -> Any:
        """Keep these from now on, None for nothing; what was kept until now."""
        ...


Renew = Callable[[], None]  # lets go of memory that gradients are written to again and again
Announcement = Callable[[Sequence[torch.Tensor], Renew | None, Unsynced | None], None]
_listeners: list[Announcement] = []


def announce_gradients(
    params: Sequence[torch.Tensor], *, renew: Renew | None = None, unsynced: Unsynced | None = None
) -> None:
    """Say that this backward sets `.grad` of these parameters. To be called within it, once or more."""
    for hear in _listeners:
        hear(params, renew, unsynced)


def on_announcement(hear: Announcement) -> None:
    """Hear of all announcements from now on."""
    _listeners.append(hear)
