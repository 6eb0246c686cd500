"""One thread for what must happen later: timeouts, and errands that must not be done on the spot.

An errand may be put from anywhere, a finalizer included: putting one takes no lock that the caller may hold.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Clock:
    """Runs errands, and `tick` when the earliest deadline has passed. `tick` returns the next deadline."""

    def __init__(self, tick: Callable[[], float | None]) -> None:
        self._tick = tick
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._wakes_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="weft-rpc-clock", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put_later(self, when: float, errand: Callable[[], None]) -> None:
        """Have `errand` done at a time of time.monotonic(). It must not wait."""

        def keep() -> None:
            self._later.append((when, errand))
            self._errands.put(_nothing)

        self._errands.put(keep)

    def note(self, deadline: float) -> None:
        """Make sure that `tick` runs at the deadline."""
        if deadline < self._wakes_at:
            self._errands.put(_nothing)

    def _run(self) -> None:
        while True:
            # While the calls are looked through every note wakes the thread again: none is missed.
            self._wakes_at = float("inf")
            self._wakes_at = min(self._safe_tick(), self._do_due())
            if not self._do_errands():
                return

    def _safe_tick(self) -> float:
        try:
            return self._tick() or float("inf")
        except Exception:  # without a clock nothing would ever time out
            logger.exception("weft.rpc: a look at the clock failed")
            return time.monotonic() + 1.0

    def _do_due(self) -> float:
        """Do what was put for later and is due; when the next of it is."""
        if not self._later:
            return float("inf")
        now = time.monotonic()
        due = [errand for when, errand in self._later if when <= now]
        self._later = [(when, errand) for when, errand in self._later if when > now]
        for errand in due:
            _do(errand)
        return min((when for when, _ in self._later), default=float("inf"))

    def _do_errands(self) -> bool:
        """Do what is put until it is time to tick; False at the end."""
        while True:
            wait_secs = self._wakes_at - time.monotonic()
            if wait_secs <= 0:
                return True
            try:
                errand = self._errands.get(timeout=None if wait_secs == float("inf") else wait_secs)
            except queue.Empty:
                return True
            if errand is None:
                return False
            if errand is _nothing:
                return True
            _do(errand)
            del errand  # what it holds must not live until the next one comes

    def stop(self) -> None:
        """Do the errands that are there, then end. Called from another thread than the clock's."""
        self._errands.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()


def _do(errand: Callable[[], None]) -> None:
    try:
        errand()
    except Exception:
        logger.exception("weft.rpc: an errand failed")


def _nothing() -> None:
    """The errand that only wakes the clock."""
