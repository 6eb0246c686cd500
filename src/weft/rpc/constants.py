"""Defaults, under torch's names."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_MAX_IN_FLIGHT: int = 10_000
UNSET_RPC_TIMEOUT: float = -1.0  # the default is used
