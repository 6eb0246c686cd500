"""Workers on two hosts: all that they share is a cable.

The hosts are network namespaces of one machine with a cable between them. They have nothing in common that
RPC could use but that: the same host name, the same processes' table and the same memory are there, and would
be missing between real hosts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.rpc import acts
from tests.rpc.acts import call, see
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import add, is_freed, spot
from tests.rpc.strangers import find_doors
from tests.rpc.workers import WEFT, wait_until

pytestmark = pytest.mark.processes

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


SECRET = "the same words on both hosts"
MEGABYTES = 20
PORT = 29431


@pytest.fixture(scope="module")
def pair() -> Generator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def crew(pair: tuple[Host, Host]) -> Generator[Crew]:
    """One worker on each host; they have not joined."""
    with Crew(0) as crew:
        for host in pair:
            crew.add(partial(enter, host.name))
        yield crew


def join(crew: Crew, pair: tuple[Host, Host], **options: object) -> None:
    init_method = f"tcp://{pair[0].address}:{PORT}"
    joining = [
        crew[rank].begin(
            acts.join,
            f"worker{rank}",
            rank,
            2,
            init_method,
            listen=pair[rank].address,
            secret=SECRET,
            **options,
        )
        for rank in range(2)
    ]
    for future in joining:
        future.result(30)


def test_calls_over_the_cable(crew: Crew, pair: tuple[Host, Host]) -> None:
    join(crew, pair)
    assert crew[0].do(socket.gethostname) == crew[1].do(socket.gethostname)
    for rank in range(2):
        seen = crew[rank].do(call, f"worker{1 - rank}", spot, WEFT)
        assert (seen.worker, seen.pid) == (f"worker{1 - rank}", crew[1 - rank].pid)
    crew[0].do(acts.hold_remote, "thing", "worker1", acts.make_tracked, "thing")
    assert not crew[0].do(call, "worker1", is_freed, WEFT, "thing")
    crew[0].do(acts.let_go, "thing")
    wait_until(lambda: crew[0].do(call, "worker1", is_freed, WEFT, "thing"), "freed")
    with pytest.raises(ZeroDivisionError):
        crew[0].do(call, "worker1", divmod, 1, 0)
    crew.every(acts.leave)
    assert crew.every(acts.python_threads) == [[], []]


def test_large_tensors_go_over_the_cable(crew: Crew, pair: tuple[Host, Host]) -> None:
    """The host's name is the same, and shared memory would work: it must not be used."""
    join(crew, pair)
    before = [crew[rank].do(bytes_sent, pair[rank].cable) for rank in range(2)]
    assert crew[0].do(acts.echo_tensor, "worker1", MEGABYTES << 20)
    sent = [crew[rank].do(bytes_sent, pair[rank].cable) - before[rank] for rank in range(2)]
    assert all((MEGABYTES << 20) < num_bytes < 3 * (MEGABYTES << 20) for num_bytes in sent), sent
    crew.every(acts.leave)


def test_it_listens_where_it_was_told(crew: Crew, pair: tuple[Host, Host]) -> None:
    join(crew, pair)
    for rank in range(2):
        listening = {
            door.host for door in find_doors(crew[rank].pid) if not door.is_unix and door.port != PORT
        }
        assert listening == {pair[rank].address}
    crew.every(acts.leave)


def test_a_death_is_seen_on_the_other_host(crew: Crew, pair: tuple[Host, Host]) -> None:
    join(crew, pair)
    waiting = crew[0].begin(see, "sync", "worker1", "gate")
    wait_until(lambda: crew[1].do(acts.count_at, "worker1", "at gate gate") == 1, "it waits")
    died = time.monotonic()
    crew[1].kill()
    seen = waiting.result(20)
    assert seen.error == "PeerError", seen
    assert seen.ranks == (1,), seen
    assert seen.raised_secs - died < 3, seen


def test_a_cut_cable_is_an_error_in_time(crew: Crew, pair: tuple[Host, Host]) -> None:
    join(crew, pair)
    assert crew[0].do(call, "worker1", add, 1, 2) == 3
    ip("-n", pair[1].name, "link", "set", pair[1].cable, "down")
    try:
        seen = crew[0].do(see, "sync", "worker1", "gate", 1.0)
        assert seen.is_peer_error, seen
        assert seen.ranks == (1,), seen
        assert seen.raised_secs - seen.entered_secs < 4, seen
    finally:
        ip("-n", pair[1].name, "link", "set", pair[1].cable, "up")


def test_hosts_without_a_secret_stay_strangers(crew: Crew, pair: tuple[Host, Host]) -> None:
    """What makes processes of one host friends is not there between hosts, though here it could be read."""
    init_method = f"tcp://{pair[0].address}:{PORT}"
    began = time.monotonic()
    joining = [
        crew[rank].begin(acts.join, f"worker{rank}", rank, 2, init_method, rpc_timeout=3) for rank in range(2)
    ]
    for future in joining:
        with pytest.raises((RuntimeError, ValueError), match=r"secret|listen"):
            future.result(20)
    assert time.monotonic() - began < 8
