"""What a stranger may cost a worker who only connects, or sends without an end: nothing that lasts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rpc import acts, floods, guests, wire_fuzz
from tests.rpc.acts import call
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import add
from tests.rpc.strangers import Door, find_doors
from weft.rpc import inbox
from weft.rpc.links import Links
from weft.rpc.secret import derive_keys
from weft.trust import make_secret

pytestmark = pytest.mark.processes

MAX_FILES = 200  # of the worker, before it makes room for itself
MANY = 9_000
MOST_FILES = 4_000
LISTEN = {"listen": "127.0.0.1", "secret": "0123456789abcdef" * 4}
EVERY_DOOR = pytest.mark.parametrize("options", [{}, LISTEN], ids=["local", "tcp"])


def count_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@EVERY_DOOR
def test_more_connections_than_descriptors(options: dict[str, str]) -> None:
    """They are the same user's, or a network's: some come in, and nobody is kept out by them."""
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        crew[1].do(floods.limit_files, MAX_FILES)
        for member in (0, 1):
            crew[member].do(acts.join, f"worker{member}", member, None, init_method, **options)
        doors = find_doors(crew[1].pid)
        assert floods.fill(doors, MANY) >= MANY
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew[2].do(acts.join, "worker2", 2, None, init_method, **options)
        assert crew[2].do(call, "worker1", add, 1, 2) == 3
        for member in (2, 1, 0):
            crew[member].do(acts.leave)
        assert crew[1].do(acts.python_threads) == []


def test_a_peer_connects_during_a_flood_of_unproven_connections() -> None:
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        crew[1].do(floods.limit_files, MAX_FILES)
        crew[0].do(acts.join, "worker0", 0, None, init_method)
        crew[1].do(acts.join, "worker1", 1, None, init_method)
        doors = find_doors(crew[1].pid)
        with floods.held_open(doors, MANY) as held:
            assert len(held) >= MANY
            crew[2].do(acts.join, "worker2", 2, None, init_method)
            assert crew[2].do(call, "worker1", add, 1, 2) == 3
            assert crew[0].do(call, "worker1", add, 1, 2) == 3
            assert count_files(crew[1].pid) < MOST_FILES
        for member in (2, 1, 0):
            crew[member].do(acts.leave)


def test_another_user_does_not_reach_a_worker() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        crew[1].do(floods.limit_files, MAX_FILES)
        crew[0].do(acts.join, "worker0", 0, None, init_method)
        crew[1].do(acts.join, "worker1", 1, None, init_method)
        doors = find_doors(crew[1].pid)
        assert doors
        assert all(door.is_unix for door in doors)
        crew[2].do(guests.become_nobody)
        assert set(crew[2].do(floods.try_doors, doors)) == {"PermissionError"}
        # And what everybody sees of the sockets of this host leads nowhere.
        crew[2].do(floods.fill, [*doors, *floods.abstract_doors("@weft-rpc-")], 4 * MAX_FILES)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        for member in (1, 0):
            crew[member].do(acts.leave)


def test_an_undumpable_worker_accepts_its_own_user_only() -> None:
    """An undumpable process has an abstract inbox, which anybody can find, and which is shut to others."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        secret = LISTEN["secret"]
        for member in (0, 1):
            crew[member].do(acts.join, "alone", 0, 1, crew.meeting())  # imports all
            crew[member].do(acts.leave)
            crew[member].do(guests.become_nobody)
            crew[member].do(acts.join, f"worker{member}", member, None, init_method, secret=secret)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        doors = [door for door in find_doors(crew[1].pid) if door.is_unix]
        assert [door.host[:10] for door in doors] == ["@weft-rpc-"]
        assert crew[2].do(floods.try_doors, doors) == ["kept out"]  # root, even
        crew[2].do(floods.fill, doors, 4 * MAX_FILES)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        for member in (1, 0):
            crew[member].do(acts.leave)


@EVERY_DOOR
def test_a_large_first_frame_is_not_buffered(options: dict[str, str]) -> None:
    with Crew(2) as crew:
        crew.join(**options)
        pid = crew[1].pid
        before = floods.resident_bytes(pid)
        for door in find_doors(pid):
            for size in (1 << 30, (1 << 63) - 1, 1 << 63):
                taken = floods.send_first_frame(door, size, 256 * floods.MB)
                assert taken < 64 * floods.MB
        assert floods.resident_bytes(pid) - before < 48 * floods.MB
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)


def test_a_handshake_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "HANDSHAKE_SECS", 0.2)
    worker = Links(0, derive_keys(make_secret()), "127.0.0.1", lambda *_: None)
    try:
        assert worker.remote_address is not None
        host, port = worker.remote_address.removeprefix("tcp://").split(":")
        for door in (Door(worker.local_address.removeprefix("ipc://")), Door(host, int(port))):
            with door.connect() as sock:
                sock.settimeout(30)
                sock.sendall(floods.CURVE_GREETING)  # and nothing after it
                while sock.recv(4096):
                    pass  # its end of the connection is closed, or recv raises
    finally:
        worker.stop()
        worker.close()


def test_nothing_is_left_behind_by_the_last_of_a_group_without_a_size(tmp_path: Path) -> None:
    with Crew(2) as crew:
        crew.every(guests.set_temporary_folder, str(tmp_path))
        init_method = crew.meeting()
        for rank in range(2):
            crew[rank].do(acts.join, f"worker{rank}", rank, None, init_method)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        for rank in range(2):
            crew[rank].kill()
        assert not list(tmp_path.iterdir())
        assert not floods.abstract_doors("@weft-rpc-")


def test_nothing_is_left_behind_by_one_that_was_killed(tmp_path: Path) -> None:
    with Crew(2) as crew:
        crew.every(guests.set_temporary_folder, str(tmp_path))
        crew.join()
        crew[1].kill()
        assert not list(tmp_path.iterdir())
        assert not floods.abstract_doors("@weft-rpc-")


def test_random_handshakes() -> None:
    """A small run of scripts/rpc_fuzz --doors."""
    wire_fuzz.run_doors(1_500, seed=22)
