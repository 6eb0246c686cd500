"""The key-value stores in which ranks meet.

torch.distributed documents these classes but does not declare them as exported,
which pyright minds; so they are named here and nowhere else.

Among ranks of one host the store listens on the loopback interface only. TCPStore itself binds to every
interface, whatever host it is given, so it is passed a socket that listens already. Other users of the host
can still connect to the loopback: values in a store are sealed (weft.trust).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta

import torch.distributed as dist

from weft.errors import ConfigError

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_HashStore = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_BACKLOG = 4096  # the kernel's own limit: all ranks may come at once


def loopback_host() -> str:
    """The address at which processes of this machine meet. Raises ConfigError where there is none."""
    for family, host in _LOOPBACKS:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((host, 0))
                probe.connect((host, 9))  # sends nothing; a device that is down can be bound but has no route
        except OSError:
            continue
        return host
    raise ConfigError(
        "launch: this machine has no loopback network, at which its processes meet: neither 127.0.0.1 nor "
        "::1 can be reached. Bring it up (ip link set lo up), or use kind='thread'."
    )


def host_store() -> tuple[Store, int]:
    """Host a store for processes of this machine, as long as it is referenced; return it with its port."""
    host = loopback_host()
    listener = _listen(host, 0)
    port = listener.getsockname()[1]
    store = _TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at one address. The caller closes it, or detaches it for a store."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Allows the port of a store that has just ended, not that of one that still listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_store(port: int) -> Store:
    """Connect to the store that another process of this machine hosts.

    Once a process and not once a job: torch looks the address up in the DNS each time, only to log it,
    and where the DNS does not answer that takes five seconds.
    """
    return _TCPStore(loopback_host(), port, is_master=False)


def join_store(host: str, port: int, timeout: timedelta, *, is_host: bool) -> Store:
    """Connect to the store at an address that all ranks know; one of them hosts it.

    Nobody is waited for but the host. A process that hosts it twice, for one world after another or for
    torch's rendezvous besides, has one server for both. At a loopback address it listens on that only.
    """
    listener = _listen_at_loopback(host, port) if is_host else None
    return _TCPStore(
        host,
        port,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback one. Of names only "localhost" counts: there is no lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen_at_loopback(host: str, port: int) -> socket.socket | None:
    """A listening socket at a loopback address; None for other addresses, and where the port is in use."""
    if not is_loopback(host):
        return None
    try:
        return _listen(loopback_host() if host == "localhost" else host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None  # TCPStore then uses this process's own server of that port, or raises


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
    host = loopback_host()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
