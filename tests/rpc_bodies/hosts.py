"""Two hosts on one machine: network namespaces with a cable between them.

They have nothing in common that RPC could use but that cable: the same host name, the same processes' table
and the same memory are there, and would be missing between real hosts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A namespace, its address on the cable, and its end of the cable."""

    name: str
    address: str
    cable: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def two_hosts() -> Generator[tuple[Host, Host]]:
    """Make them, and take them down; skip where that can't be done."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip is missing")
    mark = f"weft{os.getpid()}"
    hosts = (
        Host(f"{mark}a", "10.213.77.1", f"w{os.getpid()}a"),
        Host(f"{mark}b", "10.213.77.2", f"w{os.getpid()}b"),
    )
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        first, second = hosts
        try:
            ip(
                "link",
                "add",
                first.cable,
                "netns",
                first.name,
                "type",
                "veth",
                "peer",
                second.cable,
                "netns",
                second.name,
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable (veth) can be made here: {error.stderr.strip()}")
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.name, "link", "set", host.cable, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, timeout=20)


def enter(name: str) -> None:
    """Move the calling thread, and those it will start, to that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {name}")


def bytes_sent(cable: str) -> int:
    """How much this host has put on the cable."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{cable}:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError(f"{cable} is not on this host")
