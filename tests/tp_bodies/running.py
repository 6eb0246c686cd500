"""Run a body on ranks that are threads, with weft's tensor parallelism and with torch's.

A hang ends soon: each collective waits twenty seconds at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.tensor.parallel as torch_tp

import weft
import weft.tensor_parallel as weft_tp

LIBRARIES = pytest.mark.parametrize("tp", [weft_tp, torch_tp], ids=["weft", "torch"])
WEFT = weft_tp


def on_threads(body: Callable[..., object], ranks: int, *args: Any) -> None:
    """Run `body(*args)` on each rank; raise with every rank's traceback if one fails."""
    weft.launch(body, args=args, ranks=ranks, kind="thread", timeout=60, collective_timeout=20)
