"""Stores of one host's ranks listen where only that host can connect."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from weft.launcher.stores import connect_store, free_port, host_store, is_loopback, join_store

_LISTENS = "0A"
_LOOPBACKS = {"0100007F", "00000000000000000000000001000000"}
TIMEOUT = timedelta(seconds=30)


def addresses_listened_at(port: int) -> set[str]:
    """The local addresses of all sockets that listen at a port, as the kernel writes them."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        if (path := Path(f"/proc/net/{table}")).exists()
        for line in path.read_text().splitlines()[1:]
    ]
    ends = [fields[1].split(":") for fields in lines if fields[3] == _LISTENS]
    return {address for address, number in ends if int(number, 16) == port}


def other_addresses() -> list[str]:
    """This machine's addresses that other machines could use; none where it has only a loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address that no machine has
        except OSError:
            return []
        address = probe.getsockname()[0]
    return [] if is_loopback(address) else [address]


def check_only_loopback(port: int) -> None:
    assert addresses_listened_at(port) <= _LOOPBACKS
    assert len(addresses_listened_at(port)) == 1
    for address in other_addresses():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=10)


def test_the_launchers_store_listens_on_the_loopback_alone() -> None:
    store, port = host_store()
    check_only_loopback(port)
    connect_store(port).set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_at_a_loopback_address_listens_there_alone(host: str) -> None:
    port = free_port()
    first = join_store(host, port, TIMEOUT, is_host=True)
    check_only_loopback(port)
    # A world after another, while the first one's store is still there: one server for both.
    second = join_store(host, port, TIMEOUT, is_host=True)
    peer = join_store(host, port, TIMEOUT, is_host=False)
    peer.set("a", "b")
    assert (first.get("a"), second.get("a")) == (b"b", b"b")
    del first, second, peer
    assert addresses_listened_at(port) == set()
    again = join_store(host, port, TIMEOUT, is_host=True)
    assert not again.check(["a"])


def test_a_port_of_another_program_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(dist.DistNetworkError, match="EADDRINUSE"),
    ):
        join_store("127.0.0.1", other.getsockname()[1], TIMEOUT, is_host=True)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("node1", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_known(host: str, is_one: bool) -> None:
    assert is_loopback(host) is is_one
