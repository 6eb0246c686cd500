from __future__ import annotations

from tests.rpc.workers import worker

__all__ = ["worker"]
