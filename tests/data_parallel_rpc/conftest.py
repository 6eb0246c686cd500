from __future__ import annotations

from tests.data_parallel_rpc.trainers import trainer

__all__ = ["trainer"]
