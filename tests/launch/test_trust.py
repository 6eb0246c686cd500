"""Launched ranks have a secret that shows nowhere, and others of the host get neither it nor their memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.errors import ConfigError, PeerTimeoutError, TamperedError
from weft.launcher import RankPool
from weft.launcher.stores import free_port
from weft.launcher.wire import Meet
from weft.local.introduction import Introduction
from weft.testing.pool import shared_pool
from weft.trust import install_secret, job_secret, make_secret

pytestmark = pytest.mark.processes

STRANGERS_USER = 65534


def derived() -> str:
    secret = job_secret()
    assert secret is not None
    return secret.derive("test").hex()


def own_environment() -> tuple[str, str, str]:
    environment = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    arguments = Path("/proc/self/cmdline").read_bytes().decode(errors="replace")
    child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    return environment, arguments, child


def test_the_ranks_of_a_job_have_one_secret_and_jobs_have_different_ones() -> None:
    pool = shared_pool(2)
    first, second = pool.run(derived), pool.run(derived)
    assert len({*first}) == 1
    assert len({*second}) == 1
    assert first != second


@pytest.mark.full
def test_the_secret_is_in_no_environment_and_no_argument_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_RPC_SECRET", "what the user says stays")
    with RankPool(1) as pool:
        ((environment, arguments, child),) = pool.run(own_environment)
    for text in (environment, arguments, child):
        assert [name for name in text.replace("\0", "\n").split("\n") if "SECRET" in name] in (
            [],
            ["WEFT_RPC_SECRET=what the user says stays"],
        )
    monkeypatch.delenv("WEFT_RPC_SECRET")
    for text in shared_pool(2).run(own_environment)[0]:
        assert "SECRET" not in text


def test_the_message_with_the_secret_does_not_show_it() -> None:
    secret = make_secret()
    message = Meet(1234, secret.reveal(), is_given=False)
    assert secret.reveal().hex() not in repr(message)
    assert repr(secret.reveal()) not in repr(message)
    assert pickle.loads(pickle.dumps(message)) == message  # over the control socket


@pytest.mark.full
def test_a_given_secret_is_used_for_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o644)
    monkeypatch.setenv("WEFT_SECRET_FILE", str(path))
    with pytest.raises(ConfigError, match="other users may open it"):
        RankPool(1)
    path.chmod(0o600)
    with RankPool(1) as pool:
        (first,), (second,) = pool.run(derived), pool.run(derived)
    install_secret(None)
    try:
        assert first == second == derived()
    finally:
        install_secret(None)


FALSE_PAGES: list[Any] = [
    ["self", "../../../tmp/evil", 1, 4096, 5],
    [1, 3, 1, 4096, 5],
    [-1, 3, 1, 4096, 5],
    [os.getpid(), 3, 1, 1 << 60, 5],
    [True, 3, 1, 4096, 5],
]


def make_group_while_someone_writes(key: str, false: bytes) -> tuple[str, float]:
    """Rank 1 finds a false value under a key of a new group's. What is raised, and a sum of the world."""
    real_wait = Introduction._wait
    if dist.get_rank() == 1:

        def wait(self: Introduction, keys: Any) -> None:
            real_wait(self, keys)
            if key in keys:
                self._corner.set(key, false)

        Introduction._wait = wait
    raised = ""
    try:
        dist.new_group([0, 1], backend="weft", timeout=timedelta(seconds=1))
    except (TamperedError, PeerTimeoutError) as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        if dist.get_rank() == 1:
            Introduction._wait = real_wait
    total = torch.ones(300_000)
    dist.all_reduce(total)
    return raised, total[-1].item()


@pytest.mark.parametrize("name", FALSE_PAGES)
def test_a_page_that_a_stranger_wrote_is_refused_by_the_ranks(name: object) -> None:
    false = json.dumps({"name": name}).encode()
    first, second = shared_pool(2).run(make_group_while_someone_writes, args=("page", false), timeout=60)
    assert second[0].startswith("TamperedError: the value 'page' of rank 0 in the store of group ")
    assert first[0].startswith("PeerTimeoutError: rank 0 waited 1 s")
    assert first[1] == second[1] == 2.0


# Another user of the host, with a rank's process, the store's port and a name in the store.
STRANGER = """
import os, sys
import torch.distributed as dist
from weft.trust import open_peer_memory, read_exposed_secret

pid, port, key, user = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
os.setgroups([]); os.setgid(user); os.setuid(user)
store = dist.TCPStore("127.0.0.1", port, is_master=False)
store.set(key, "a stranger's")  # a store lets everybody in: what is in it must not be believed
for name in ("fd", "environ", "mem", "maps"):
    path = f"/proc/{pid}/{name}"
    try:
        os.listdir(path) if name == "fd" else open(path, "rb").read(1)
    except PermissionError:
        continue
    sys.exit(f"{path} is open to others")
for fd in range(64):
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
    except PermissionError:
        continue
    sys.exit(f"descriptor {fd} is open to others")
for attempt in (lambda: read_exposed_secret([pid, 3, 5]), lambda: open_peer_memory(pid, 3, 5, 4096)):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__)
    else:
        sys.exit("memory of another user was opened")
"""


JOIN_WORLD = """
import weft
try:
    weft.init(timeout=60)
except weft.WeftError as error:
    print(type(error).__name__, error)
"""


def test_ranks_in_two_containers_of_one_host_are_told_what_they_need() -> None:
    separate = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*separate, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no process namespace can be made here: {error}")
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", JOIN_WORLD],
            env=os.environ | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(([], separate))
    ]
    first, second = (rank.communicate(timeout=50)[0] for rank in ranks)
    assert second.startswith("PeerError the first rank")
    assert first.startswith("TamperedError init: ")
    for text in (first, second):
        assert "WEFT_SECRET_FILE" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_nothing() -> None:
    told = shared_pool(2).run(attack_own_process, args=(STRANGER,), timeout=90)
    assert told[0] == ("PermissionError\nPermissionError\n", "")
    assert told[1] is None


def attack_own_process(script: str) -> tuple[str, str] | None:
    """Rank 0 lets another user loose on its process and its store, while both ranks are there."""
    told = None
    dist.barrier()
    if dist.get_rank() == 0:
        store: Any = distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        arguments = [str(os.getpid()), str(store.port), "a key", str(STRANGERS_USER)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
        )
        told = done.stdout, done.stderr
    dist.barrier()
    return told
