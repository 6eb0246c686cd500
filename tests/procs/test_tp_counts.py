"""How often ranks talk in tensor parallelism, as torch's own counter has it: as often as torch's."""

from __future__ import annotations

from typing import Any

from tests.tp_bodies import counts
from tests.tp_bodies.running import LIBRARIES
from weft.testing.pool import shared_pool


@LIBRARIES
def test_counts(tp: Any) -> None:
    shared_pool(2).run(counts.run_all, args=(tp, "torch"), backend="gloo", timeout=90, collective_timeout=20)
