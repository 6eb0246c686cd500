"""Run a body on ranks that are threads. A hang ends soon: each collective waits ten seconds at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft


def on_threads(body: Callable[..., object], ranks: int, *args: Any) -> None:
    """Run `body(*args)` on each rank; raise with every rank's traceback if one fails."""
    weft.launch(body, args=args, ranks=ranks, kind="thread", timeout=30, collective_timeout=10)
