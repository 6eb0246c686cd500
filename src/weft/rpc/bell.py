"""How a worker of this host is woken: words in shared memory, which its threads sleep on (futexes).

Two kinds of threads sleep. Those of the pool take whatever comes, and one of them at a time is enough: while
one is awake nobody is woken. A caller that waits for its answer listens too, so that the answer need not be
handed to it: answers wake it first.

Whoever sends a message writes it, changes the words, and only then looks whether somebody must be woken;
whoever goes to sleep says so, and only then looks for messages a last time. With a fence between the two
steps on either side one of them sees the other.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import threading
from typing import Any

from weft.local import kernel
from weft.local.segment import Segment, SegmentName, open_segment, own_segment

_POOL, _CALLER, _AWAKE, _LISTENING = 0, 16, 32, 48  # words of 4 bytes, each in a cache line of its own
_LOOKING, _ASLEEP = 1, 2  # what a caller that listens does
_KIND = "weft-bell"  # of memory
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


class Bell:
    """The words of one worker, as one worker sees them."""

    def __init__(self, segment: Segment, ringer_id: int) -> None:
        self._segment: Segment | None = segment
        self.name: SegmentName = segment.name  # what another worker opens it by
        self._words: Any = memoryview(segment.memory).cast("I")
        self._pool_word = ctypes.c_void_p(segment.address + 4 * _POOL)
        self._caller_word = ctypes.c_void_p(segment.address + 4 * _CALLER)
        # No two rings in a row leave the same value: a sleeper sees each, however they interleave.
        self._values = itertools.count(((ringer_id & 0x3FF) << 22) + 1)
        self._fence = threading.Lock()

    def ring(self, *, is_answer: bool = False) -> None:
        """Say that there is a message: an answer is for a caller that listens, if there is one."""
        words = self._words
        words[_POOL] = words[_CALLER] = next(self._values) & 0xFFFFFFFF
        self._full_fence()
        if is_answer and words[_LISTENING]:
            if words[_LISTENING] == _ASLEEP:
                kernel.futex_wake_one(self._caller_word)
        elif not words[_AWAKE]:
            kernel.futex_wake_one(self._pool_word)

    def _full_fence(self) -> None:
        if _IS_X86:
            with self._fence:  # a locked instruction, at a tenth of the price of a system call
                pass
        else:
            kernel.fence()

    def close(self) -> None:
        """Let go of the shared memory. A thread that still looks at the words finds nothing there."""
        spare = (ctypes.c_uint32 * 64)()
        self._words = memoryview(spare).cast("B").cast("I")
        self._pool_word = ctypes.c_void_p(ctypes.addressof(spare))
        self._caller_word = ctypes.c_void_p(ctypes.addressof(spare) + 4 * _CALLER)
        self._segment = None

    # For the worker's own pool

    def signal(self) -> int:
        """What the pool's word is, to be read before looking for messages."""
        return self._words[_POOL]

    def sleep(self, signal: int, secs: float) -> None:
        """Sleep until there is a message, `secs` at most."""
        kernel.futex_wait(self._pool_word, signal, secs)

    def set_awake(self, num_awake: int) -> None:
        """Say how many of the pool's threads will look for messages without being woken."""
        self._words[_AWAKE] = num_awake
        self._full_fence()

    def wake(self) -> None:
        """Wake a thread of the pool, whether one is awake or not."""
        self._words[_POOL] = next(self._values) & 0xFFFFFFFF
        kernel.futex_wake_one(self._pool_word)

    # For a caller of the worker's own that listens

    def set_listening(self, *, is_asleep: bool) -> None:
        """Say that a caller listens: that it must be woken, or that it looks by itself.

        It looks a last time after it has said that it must be woken.
        """
        self._words[_LISTENING] = _ASLEEP if is_asleep else _LOOKING
        self._full_fence()

    def stop_listening(self) -> None:
        """Say that no caller listens."""
        self._words[_LISTENING] = 0
        self._full_fence()

    def caller_signal(self) -> int:
        """What the caller's word is, to be read before looking for messages."""
        return self._words[_CALLER]

    def sleep_as_caller(self, signal: int, secs: float) -> None:
        """Sleep until there is an answer, `secs` at most."""
        kernel.futex_wait(self._caller_word, signal, secs)

    def wake_caller(self) -> None:
        """Wake the caller that listens."""
        self._words[_CALLER] = next(self._values) & 0xFFFFFFFF
        kernel.futex_wake_one(self._caller_word)


def own_bell(own_id: int) -> Bell:
    """This worker's bell."""
    return Bell(own_segment(1, is_reclaimed=False, kind=_KIND), own_id)


def open_bell(name: SegmentName, peer_id: int, own_id: int) -> Bell:
    """Another worker's bell. Raises PeerError for memory that is no bell, and as open_segment does."""
    return Bell(open_segment(name, peer_id, _KIND), own_id)
