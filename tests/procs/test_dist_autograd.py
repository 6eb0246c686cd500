"""Distributed autograd between workers that are processes.

Bodies of one kind run in one group of workers, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.dist_autograd_bodies import (
    contexts,
    corners,
    cuts,
    exact,
    failing,
    hooks,
    late_hooks,
    optimizing,
    passes,
    received,
    sharing,
)
from tests.rpc_bodies.running import Body, on_processes

GROUPS: dict[str, Sequence[Body]] = {
    "contexts": [*contexts.BODIES, *contexts.ON_PROCESSES],
    "cuts": cuts.BODIES,
    "received": received.BODIES,
    "corners": [*corners.BODIES, *corners.WEFT_ONLY, *corners.ON_PROCESSES],
    "passes": passes.BODIES,
    "exact": exact.WEFT_ONLY,
    "hooks": [*hooks.BODIES, *late_hooks.WEFT_ONLY],
    "failing": [*failing.BODIES, *failing.WEFT_ONLY],
    "sharing": [*sharing.ON_PROCESSES, *sharing.WEFT_ONLY, *sharing.WEFT_ON_PROCESSES],
    "optimizing": [*optimizing.BODIES, *optimizing.WEFT_ONLY],
}


@pytest.mark.parametrize("bodies", GROUPS.values(), ids=GROUPS)
def test_bodies(bodies: Sequence[Body]) -> None:
    on_processes(bodies)


def test_fast_counting_waits() -> None:
    on_processes(exact.SHORT_TIMEOUT, rpc_timeout=exact.WAIT_SECS)
