"""Process-ranks for a whole test run: one pool a size, started when first needed.

Starting ranks takes seconds, a job on a running pool milliseconds. A test that breaks
its pool costs the next one a new start and nothing else.
"""

from __future__ import annotations

import atexit
import os
import threading

from weft.launcher.pool import RankPool

_lock = threading.Lock()
_pools: dict[int, RankPool] = {}
_owner_pid = 0


def shared_pool(ranks: int) -> RankPool:
    """The pool of this size that lives through the test run; a new one if the last one broke.

    Don't close it: that is done at exit.
    """
    global _owner_pid
    with _lock:
        if _owner_pid != os.getpid():
            # After a fork the pools are the parent's: using or closing them here would break its jobs.
            _pools.clear()
            _owner_pid = os.getpid()
            atexit.register(close_shared_pools)
        pool = _pools.get(ranks)
        if pool is None or not pool.is_usable:
            if pool is not None:
                pool.close()
            pool = _pools[ranks] = RankPool(ranks)
        return pool


def close_shared_pools() -> None:
    """End all shared pools; the next shared_pool() starts a new one."""
    with _lock:
        if _owner_pid == os.getpid():
            for pool in _pools.values():
                pool.close()
            _pools.clear()
