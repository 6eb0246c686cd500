"""Groups of workers for the tests that don't take `worker` yet; see tests/rpc/workers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import weft
from tests.rpc.workers import (
    RANKS,
    TORCH,
    WEFT,
    Body,
    Worker,
    joined,
    run_each,
    shown,
    takes,
    wait_until,
)
from weft.testing.pool import shared_pool

__all__ = [
    "RANKS",
    "TORCH",
    "WEFT",
    "Body",
    "Worker",
    "joined",
    "on_processes",
    "on_threads",
    "run_each",
    "shown",
    "takes",
    "wait_until",
]


def run_bodies(lib: str, bodies: Sequence[Body], options: dict[str, Any]) -> None:
    with joined(lib, **options) as worker:
        run_each(worker, bodies)


def on_threads(bodies: Body | Sequence[Body], ranks: int = RANKS, **options: Any) -> None:
    bodies = bodies if isinstance(bodies, Sequence) else [bodies]
    weft.launch(
        run_bodies,
        args=(WEFT, bodies, options),
        ranks=ranks,
        kind="thread",
        timeout=90,
        collective_timeout=60,
    )


def on_processes(bodies: Body | Sequence[Body], ranks: int = RANKS, lib: str = WEFT, **options: Any) -> None:
    bodies = bodies if isinstance(bodies, Sequence) else [bodies]
    shared_pool(ranks).run(run_bodies, args=(lib, bodies, options), timeout=90, collective_timeout=60)
