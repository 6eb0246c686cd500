"""How long to look for messages before going to sleep.

To be woken takes longer than most calls, and what has slept runs on cold caches. So a thread that expects a
message looks for it by itself: for a moment where every worker of the host can have a core, and for longer
where the last messages came soon. The long looks pause when another thread or process needs the core: the
longer, the more often that is so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from weft.local import kernel

_MOMENT_SECS, _LONG_SECS = 0.0001, 0.002
_CROWDED_SECS = 0.0003  # a look that takes this long had to wait for its turn
_FIRST_PAUSE_SECS, _LAST_PAUSE_SECS = 0.002, 0.2
_CHECK_SECS = 0.005  # how long what the system says of its load is taken to hold
_RECOVERY = 0.95  # of the pause is left after a look that was worth it


class Lookout:
    """Looks for messages on behalf of threads that do so one at a time."""

    def __init__(self) -> None:
        self.is_on = False  # whether it may: where each worker has an interpreter of its own
        self.moment_secs = 0.0  # what it takes in any case
        self._is_chat = False  # messages come soon
        self._gave_up_at = 0.0
        self._paused_until = 0.0
        self._pause_secs = _FIRST_PAUSE_SECS
        self._checked_until = 0.0

    def allow(self, *, is_on: bool, has_cores: bool) -> None:
        """Say whether it may look at all, and whether every worker of the host can have a core."""
        self.is_on = is_on
        self.moment_secs = _MOMENT_SECS if is_on and has_cores else 0.0

    def look(self, has_mail: Callable[[], bool], has_ended: Callable[[], bool]) -> bool:
        """Look for a while; whether a message came. Gives way to whatever else wants to run."""
        if not self.is_on:
            return False
        now = time.monotonic()
        is_long = self._is_chat and now >= self._paused_until and not self._finds_crowd(now)
        ends_at = now + (_LONG_SECS if is_long else self.moment_secs)
        while now < ends_at:
            if has_mail():
                self._is_chat = True
                self._pause_secs = max(_FIRST_PAUSE_SECS, self._pause_secs * _RECOVERY)
                return True
            if has_ended():
                return False
            before = now
            kernel.yield_core()
            now = time.monotonic()
            if now - before > _CROWDED_SECS:
                self._pause(now)
                break
        self._gave_up_at = now
        return False

    def _finds_crowd(self, now: float) -> bool:
        """Whether more threads want to run than there are cores; looked up now and then."""
        if now < self._checked_until:
            return False
        if num_runnable() > (os.cpu_count() or 1):
            self._pause(now)
            return True
        self._checked_until = now + _CHECK_SECS
        return False

    def _pause(self, now: float) -> None:
        self._paused_until = now + self._pause_secs
        self._pause_secs = min(2 * self._pause_secs, _LAST_PAUSE_SECS)

    def note_woken(self) -> None:
        """A message came after the thread went to sleep: if soon, the next look is a long one."""
        if self.is_on:
            self._is_chat = time.monotonic() - self._gave_up_at < _LONG_SECS


def num_runnable() -> int:
    """How many threads of the machine run or wait for a core, this one included; 0 where nobody knows."""
    try:
        file = os.open("/proc/loadavg", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 64).split()[3].split(b"/")[0])
    except (IndexError, ValueError):
        return 0
    finally:
        os.close(file)
