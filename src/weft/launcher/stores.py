"""The key-value stores in which ranks meet.

torch.distributed documents these classes but does not declare them as exported,
which pyright minds; so they are named here and nowhere else.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_HOST = "127.0.0.1"


def host_store(timeout: timedelta) -> tuple[Store, int]:
    """Host a store for processes of this machine, as long as it is referenced; return it with its port."""
    store = _TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, store.port


def connect_store(port: int, timeout: timedelta) -> Store:
    """Connect to the store that another process of this machine hosts."""
    return _in_own_corner(_TCPStore(_HOST, port, is_master=False, timeout=timeout))


def memory_store() -> Store:
    """Make a store for threads of this process, or for a world of one."""
    return _HashStore()


def share_store(store: Store) -> Store:
    """A thread-rank's view of a memory_store."""
    return _in_own_corner(store)


def _in_own_corner(store: Store) -> Store:
    # The default group's keys stay apart from those of user code that uses the same store.
    return _PrefixStore("launch", store)
