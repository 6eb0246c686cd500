"""RRefs between workers that are processes: use, and how long values live."""

from __future__ import annotations

from tests.rpc_bodies import lifetimes, rrefs
from tests.rpc_bodies.running import on_processes


def test_rrefs() -> None:
    on_processes([*rrefs.BODIES, *rrefs.WEFT_ONLY])


def test_lifetimes() -> None:
    on_processes([*lifetimes.BODIES, *lifetimes.WEFT_ONLY])


def test_again_and_again() -> None:
    """What is shared and forgotten at the same moment: races show when they are run often."""
    often = [rrefs.shared_between_workers, rrefs.rrefs_returned, lifetimes.many_hands]
    on_processes(often * 10)
