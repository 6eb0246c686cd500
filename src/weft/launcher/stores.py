"""The key-value stores in which ranks meet.

torch.distributed documents these classes but does not declare them as exported,
which pyright minds; so they are named here and nowhere else.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_HOST = "127.0.0.1"


def host_store() -> tuple[Store, int]:
    """Host a store for processes of this machine, as long as it is referenced; return it with its port."""
    store = _TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    return store, store.port


def connect_store(port: int) -> Store:
    """Connect to the store that another process of this machine hosts.

    Once a process and not once a job: torch looks the address up in the DNS each time, only to log it,
    and where the DNS does not answer that takes five seconds.
    """
    return _TCPStore(_HOST, port, is_master=False)


def memory_store() -> Store:
    """Make a store for threads of this process, or for a world of one."""
    return _HashStore()


def corner_of(store: Store, name: str, timeout: timedelta) -> Store:
    """A part of a store for one group of ranks, which never meets the keys of another."""
    corner = _PrefixStore(name, store)
    corner.set_timeout(timeout)
    return corner


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]
