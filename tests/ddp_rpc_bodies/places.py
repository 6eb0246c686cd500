"""What trainers keep for each other's calls. Thread-ranks share this module: all is kept by worker."""

from __future__ import annotations

import threading
from typing import Any

from tests.ddp_rpc_bodies.libraries import rpc
from tests.ddp_rpc_bodies.modes import Gradients, context_gradients, copied, named_parameters

_kept: dict[str, Any] = {}
_done: dict[str, threading.Event] = {}


def keep(worker: str, thing: Any) -> None:
    _kept[worker] = thing
    _done[worker] = threading.Event()


def end() -> None:
    """The worker that runs this need not wait any longer."""
    _done[rpc.get_worker_info().name].set()


def serve(worker: str, secs: float = 60.0) -> None:
    """Wait until somebody has called `end` here, and keep nothing."""
    assert _done[worker].wait(secs), f"nobody told {worker} to end"
    forget(worker)


def kept() -> Any:
    """What the worker that runs this keeps."""
    return _kept[rpc.get_worker_info().name]


def forget(worker: str) -> None:
    del _kept[worker]


def call_kept(*args: Any) -> Any:
    return kept()(*args)


def kept_gradients(context_id: int) -> Gradients:
    return context_gradients(context_id, kept())


def kept_grads() -> Gradients:
    return {name: copied(param.grad) for name, param in named_parameters(kept())}
