"""The thread that a rank's function runs on: its world, and what ends when the function has.

The launcher says that a thread is a rank, and that the rank has ended. RPC hears of it here, so that
the launcher needs none of it: worker threads enter the rank's world, and an agent ends with its rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

EnterWorld = Callable[[], AbstractContextManager[None]]
# Called with why the rank failed, or None.
EndOfRank = Callable[[str | None], None]


class _Mine(threading.local):
    is_rank = False
    enter_world: EnterWorld = nullcontext
    at_end: EndOfRank | None = None


_mine = _Mine()


def begin_rank(enter_world: EnterWorld) -> None:
    """Say that this thread is a rank beside others of its process; its groups are found in `enter_world`."""
    _mine.is_rank = True
    _mine.enter_world = enter_world


def is_rank() -> bool:
    """Whether this thread is a rank beside others of its process."""
    return _mine.is_rank


def rank_world() -> EnterWorld:
    """The world of this thread's rank: that of its process, unless ranks are threads."""
    return _mine.enter_world


def at_end_of_rank(end: EndOfRank) -> None:
    """Call `end` on this thread when the function of its rank has ended. A later one takes its place."""
    _mine.at_end = end


def end_rank(failure: str | None = None) -> None:
    """Say that this thread's rank has ended, with why if it failed."""
    if _mine.at_end is not None:
        _mine.at_end(failure)
