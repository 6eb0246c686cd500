"""Ranks of one host come to one secret through a store that others may write to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from weft.errors import ConfigError, PeerError, TamperedError
from weft.launcher.stores import host_store
from weft.trust import (
    JobSecret,
    address_of,
    expose_secret,
    install_secret,
    job_secret,
    make_secret,
    share_secret,
    sharing,
)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = job_secret()
    monkeypatch.delenv("WEFT_SECRET_FILE", raising=False)
    install_secret(None)
    yield
    install_secret(before)


def say(said: object) -> dist.HashStore:
    """A store in which this stands as the first rank's word."""
    store = dist.HashStore()
    store.set("secret", said if isinstance(said, bytes) else json.dumps(said))
    return store


def test_the_first_rank_exposes_one_and_the_others_read_it() -> None:
    store = dist.HashStore()
    first = share_secret(store, 0)
    assert isinstance(first, JobSecret)
    assert share_secret(store, 1) == first
    assert job_secret() is None, "the caller decides whether it is this process's"
    said = store.get("secret")
    assert first.reveal() not in said
    assert first.reveal().hex().encode() not in said


def test_one_descriptor_serves_all_stores_and_each_store_has_its_secret() -> None:
    store, other = dist.HashStore(), dist.HashStore()
    secret = share_secret(store, 0, bound_to="port 1")
    before = len(os.listdir("/proc/self/fd"))
    assert share_secret(other, 0, bound_to="port 2") != secret
    assert len(os.listdir("/proc/self/fd")) == before
    # Led to another store of this user, a rank gets a secret that fits neither.
    assert share_secret(other, 1, bound_to="port 1") == secret
    assert share_secret(other, 1, bound_to="port 1") != share_secret(other, 1, bound_to="port 2")


def test_addresses_of_stores(tmp_path: Path) -> None:
    store, port = host_store()
    for at in (store, dist.PrefixStore("a", store), dist.PrefixStore("b", dist.PrefixStore("a", store))):
        assert address_of(at) == f"port {port}"
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link"):
        assert address_of(dist.FileStore(str(folder / "file"))) == f"file {tmp_path.resolve() / 'file'}"
    assert address_of(dist.PrefixStore("a", dist.HashStore())) == ""


def test_a_given_secret_is_taken() -> None:
    store = dist.HashStore()
    install_secret(secret := make_secret())
    assert share_secret(store, 0) is secret
    assert share_secret(store, 1) is secret
    assert json.loads(store.get("secret")) == {"given": True}
    install_secret(None)
    with pytest.raises(ConfigError, match="has been given a secret for this job, and this rank has not"):
        share_secret(store, 1)


def test_a_first_rank_that_can_not_expose_a_secret_publishes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(secret: JobSecret) -> tuple[int, int, int]:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(sharing, "expose_secret", refuse)
    store = dist.HashStore()
    assert share_secret(store, 0) is None
    assert share_secret(store, 1) is None


PLACE = [os.getpid(), 3, 4]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"x" * 10_000_000,
        None,
        7,
        "place",
        [],
        {},
        {"place": PLACE, "given": True},
        {"other": PLACE},
        {"place": "/proc/self/fd/3"},
        {"place": {"pid": 1}},
        {"place": [*PLACE, 5]},
        {"place": ["self", "../../../tmp/evil", 4]},
        {"place": [True, 3, 4]},
        {"place": [-1, 3, 4]},
        {"place": [os.getpid(), -1, 4]},
        {"place": [os.getpid(), 3, 1 << 80]},
        {"place": [[os.getpid()], 3, 4]},
    ],
)
def test_malformed_entries_are_refused(said: object) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TamperedError):
        share_secret(say(said), 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_place_that_leads_to_nothing_or_elsewhere_is_refused(tmp_path: Path) -> None:
    pid, fd, inode = expose_secret(make_secret())
    evil = tmp_path / "evil"
    evil.write_bytes(b"x" * 32)
    with open(evil, "rb") as file:
        of_a_file = [os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino]
        for place in (of_a_file, [4194303, fd, inode], [pid, fd, inode + 1], [pid, 1 << 20, inode]):
            with pytest.raises(PeerError, match=r"be found here \(.*\): it has ended"):
                share_secret(say({"place": place}), 1)


_STRANGER = """
import os, sys
from weft.trust import expose_secret, make_secret
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(*expose_secret(make_secret()), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_secret_that_another_user_exposes_is_refused() -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", _STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with stranger:
        assert stranger.stdout is not None
        place = [int(number) for number in stranger.stdout.readline().split()]
        with pytest.raises(TamperedError, match="of user 65534"):
            share_secret(say({"place": place}), 1)
