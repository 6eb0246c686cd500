"""How long to look for messages before going to sleep.

To be woken takes longer than most calls, and what has slept runs on cold caches. So a thread that expects a
message looks for it by itself: for a moment where every worker of the host can have a core, and for longer
where the last messages came soon.

Two workers that talk may end up on one core: whoever is woken starts where its waker is, and a system that
sees two threads take turns has no reason to part them. Each then waits for the other's turn in every look.
The one that serves notices and moves to another core; if that does not help, the machine has more to do than
cores, and the long looks pause: the longer, the more often that is so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.local import kernel

_MOMENT_SECS, _LONG_SECS = 0.0001, 0.002
_TURN_SECS = 0.00003  # another thread's turn on the core: longer than to look for messages itself
_CROWDED_SECS = 0.0003  # longer than to work on most of them
_SLICE_SECS = 0.001  # as long as it may have it, or holds the interpreter's lock: that looks the same
_FEW = 3  # turns in a row are no accident
_SETTLE_SECS = 0.01  # between two moves
_FIRST_PAUSE_SECS, _LAST_PAUSE_SECS = 0.002, 0.2
_RECOVERY = 0.8  # of the pause is left after a look that was worth it


class Lookout:
    """Looks for messages on behalf of threads that do so one at a time.

    `gives_way`: the thread that looks moves to another core when it shares its own. If both of two that talk
    did so at once, they would meet again: those who wait for an answer never do.
    """

    def __init__(self, *, gives_way: bool = False) -> None:
        self._gives_way = gives_way
        self.is_on = False  # whether it may: where each worker has an interpreter of its own
        self.moment_secs = 0.0  # what it takes in any case
        self._is_chat = False  # messages come soon
        self._gave_up_at = 0.0
        self._paused_until = 0.0
        self._pause_secs = _FIRST_PAUSE_SECS
        self._num_shared = 0  # looks in a row in which another thread had the core
        self._settled_until = 0.0  # until then it stays on its core

    def allow(self, *, is_on: bool, has_cores: bool) -> None:
        """Say whether it may look at all, and whether every worker of the host can have a core."""
        self.is_on = is_on
        self.moment_secs = _MOMENT_SECS if is_on and has_cores else 0.0

    def look(self, has_mail: Callable[[], bool], has_ended: Callable[[], bool]) -> bool:
        """Look for a while; whether a message came. Gives way to whatever else wants to run."""
        if not self.is_on:
            return False
        now = time.monotonic()
        is_long = self._is_chat and now >= self._paused_until
        ends_at = now + (_LONG_SECS if is_long else self.moment_secs)
        turn_secs = longest_turn_secs = 0.0
        while not (has_come := has_mail()) and now < ends_at and not has_ended():
            before = now
            kernel.yield_core()
            now = time.monotonic()
            turn_secs = now - before
            longest_turn_secs = max(longest_turn_secs, turn_secs)
        if has_come:
            self._is_chat = True
            self._pause_secs = max(_FIRST_PAUSE_SECS, self._pause_secs * _RECOVERY)
        elif now >= ends_at:
            self._gave_up_at = now
        if longest_turn_secs >= _SLICE_SECS:
            self._note_company(longest_turn_secs, now)
        elif has_come:  # its sender had the last turn, or a core of its own
            self._note_company(turn_secs, now)
        return has_come

    def _note_company(self, turn_secs: float, now: float) -> None:
        """Somebody had the core for so long: if that happens again and again, find another one, or pause."""
        if turn_secs < _TURN_SECS:
            self._num_shared = 0
            return
        self._num_shared += 1 if turn_secs < _SLICE_SECS else _FEW
        if self._num_shared < _FEW:
            return
        self._num_shared = 0
        if self._gives_way and now >= self._settled_until:
            self._settled_until = now + _SETTLE_SECS
            kernel.leave_core()
        elif turn_secs > _CROWDED_SECS:
            self._pause(now)

    def _pause(self, now: float) -> None:
        self._paused_until = now + self._pause_secs
        self._pause_secs = min(2 * self._pause_secs, _LAST_PAUSE_SECS)

    def note_woken(self) -> None:
        """A message came after the thread went to sleep: if soon, the next look is a long one."""
        if self.is_on:
            self._is_chat = time.monotonic() - self._gave_up_at < _LONG_SECS
